//! The answer from recorded flows: the users of a port at a time, their certainty, and the reasons for doubt. Pure.

use super::{CLOCK, Found, Recorded, Span, TICK};
use crate::flowlog::Instant;
use egress_core::leaselog::LeaseQuestion;
use std::collections::HashMap;

/// A flow that may have had the port at the time in question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Likely {
    /// The flow. If it was open when its node went down, its end is the time of the last entry before that.
    pub flow: Recorded,
    /// Whether it had the port all that time, within any tolerated clock difference.
    pub surely: bool,
    /// The missing events that alone keep this from being sure.
    pub lost: Option<Doubt>,
}

/// A reason why the recorded flows may be incomplete.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doubt {
    /// Flows were not recorded from the first time to the second. `None` means that the log does not extend that far.
    Unwatched(Option<Instant>, Option<Instant>),
    /// This many starts and ends of flows between two times are missing, and may include a flow of the time in question.
    Lost(Instant, Instant, u64),
    /// A flow that began before this time, the start of the log, may be missing: some flows were open then, and nothing shows that all of
    /// them have ended since.
    Older(Instant),
    /// A file cannot be read, for this reason.
    Unread(String),
}

/// Missing events: the times between which they happened, and their number; 0 for an unknown number.
type Loss = (Instant, Instant, u64);

/// Returns the flows that may have had the port, and the reasons why there may be others. `living`: live flows are also known.
pub fn answer(found: Found, question: LeaseQuestion, living: bool) -> (Vec<Likely>, Vec<Doubt>) {
    let doubts = doubts(&found, question, living);
    let LeaseQuestion { from, until, slack, .. } = question;
    let losses: Vec<Loss> = found.spans.iter().flat_map(|span| span.lost.iter().copied()).collect();
    // The clock may have been set during a loss of unknown extent: then no recorded time tells what was open in between.
    let is_then =
        |(since, at, count): &&Loss| (*count == 0 || *count == CLOCK) && *since <= until + slack && from - slack <= *at;
    let then = losses.iter().find(is_then);
    let mut likely: Vec<Likely> = Vec::new();
    for (flow, has_end) in settle(found).into_iter().filter(|(flow, _)| !flow.refused) {
        let may = flow.began - slack <= until && flow.ended.is_none_or(|ended| from <= ended + TICK + slack);
        if !may {
            continue;
        }
        let fits = flow.began + TICK + slack <= from && flow.ended.is_none_or(|ended| until <= ended - slack);
        // If no file has its end, the end may be among the missing events.
        let may_end = |(since, at, count): &&Loss| *count != CLOCK && flow.began <= *at && *since < until + slack;
        let end = if has_end { None } else { losses.iter().find(may_end) };
        let lost = then.or(end).filter(|_| fits).map(|(since, at, count)| Doubt::Lost(*since, *at, *count));
        likely.push(Likely { surely: fits && lost.is_none(), lost, flow });
    }
    likely.sort_by(|a, b| (b.surely, a.flow.began, &a.flow.pod).cmp(&(a.surely, b.flow.began, &b.flow.pod)));
    (likely, doubts)
}

/// Merges the rows of each flow. The file in which a flow began lists it as open, and the file in which it ended lists it again.
/// Returns the flows, each with whether a file has its end.
fn settle(found: Found) -> Vec<(Recorded, bool)> {
    let Found { spans, mut flows, .. } = found;
    let key = |flow: &Recorded| Some((flow.ticket?, flow.protocol));
    let ends = flows.iter().enumerate().filter(|(_, (_, flow))| flow.ended.is_some());
    let ends: HashMap<(u32, u8), usize> = ends.filter_map(|(index, (_, flow))| Some((key(flow)?, index))).collect();
    let mut all = Vec::new();
    for index in 0..flows.len() {
        let Some((number, mut flow)) = flows.get(index).cloned() else { break };
        let has_end = flow.ended.is_some();
        if !has_end {
            let end = key(&flow).and_then(|key| flows.get_mut(*ends.get(&key)?));
            if let Some((_, end)) = end.filter(|(later, _)| *later > number) {
                // The first row counts: by the end, the pod's name may be gone, the policy's number reused, or the clock set.
                let was_open = spans.get(number).map(|span| span.until);
                let ended = end.ended.filter(|ended| flow.began <= *ended).or(was_open);
                *end = Recorded { ended, refused: end.refused, ..flow };
                continue;
            }
            // No flow survives the loss of the node's maps.
            let next = (number + 1..spans.len()).find(|next| spans.get(*next).is_some_and(|span| span.started));
            let last = next.and_then(|next| spans.get(next - 1));
            flow.ended = last.map(|last| last.until);
        }
        all.push((flow, has_end));
    }
    all
}

fn doubts(found: &Found, question: LeaseQuestion, living: bool) -> Vec<Doubt> {
    let Found { spans, unread, .. } = found;
    let LeaseQuestion { from, until, slack, .. } = question;
    let mut doubts = Vec::new();
    // Gaps: before the first file, before each file that does not continue its predecessor, and after the last file.
    let mut last = None;
    for span in spans {
        if last.is_none() || span.started {
            let begins = last.unwrap_or(Instant::MIN);
            if begins < until && from < span.from {
                doubts.push(Doubt::Unwatched(last, Some(span.from)));
            }
        }
        last = Some(span.until);
    }
    if last.is_none_or(|last| last < until + slack) {
        doubts.push(Doubt::Unwatched(last, None));
    }
    doubts.extend(older(spans, until).filter(|_| !living).map(Doubt::Older));
    // A flow is unknown if its start is missing, and its end is missing or has yet to come.
    // Where only the clock was set, no event is missing: times are wrong around then.
    let concerns = |(since, at, count): &&Loss| *count != CLOCK || *since <= until + slack && from - slack <= *at;
    let lost = || spans.iter().flat_map(|span| &span.lost).filter(concerns);
    let beginning = lost().rfind(|(since, _, _)| *since <= until + slack);
    let end = lost().find(|(_, at, _)| from - slack <= *at);
    if let (Some((since, at, count)), true) = (beginning, end.is_some() || !living) {
        doubts.push(Doubt::Lost(*since, *at, *count));
    }
    for (number, why) in unread {
        let Some(span) = spans.get(*number) else { continue };
        // A file covers the time until the next file begins.
        let end = spans.get(number + 1).map_or(Instant::MAX, |next| next.from);
        let covers = span.from <= until + slack && from - slack < end;
        // A file also has flows that were open when the next file began.
        if covers || doubts.contains(&Doubt::Older(end)) {
            doubts.push(Doubt::Unread(why.clone()));
        }
    }
    doubts
}

/// Returns the start of the recording that includes `time`, if flows from before the start may still be open at its end.
fn older(spans: &[Span], time: Instant) -> Option<Instant> {
    let starts = |index: &usize| spans.get(*index).is_some_and(|span| span.started);
    let last = spans.iter().rposition(|span| span.from <= time)?;
    let first = (0..=last).rev().find(starts).unwrap_or(0);
    let end = (last + 1..spans.len()).find(starts).unwrap_or(spans.len());
    let of_run = spans.get(first..end)?;
    let from = of_run.first()?.from;
    let is_known = |span: &Span| span.oldest.is_none_or(|began| from <= began + TICK);
    (!of_run.iter().any(is_known)).then_some(from)
}
