//! What follows from recorded flows: who had a port at a time, how certain that is, and why not more so. Pure.

use super::{Found, Recorded, Span, TICK};
use crate::flowlog::Instant;
use egress_core::leaselog::LeaseQuestion;
use std::collections::HashMap;

/// A flow that may have had the port at that time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Likely {
    /// The flow. The end of one that was open when its node went down is the time of the last entry before.
    pub flow: Recorded,
    /// Whether it had the port for all of that time, whatever the error of clocks.
    pub surely: bool,
}

/// Why flows are not complete.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doubt {
    /// Nobody recorded flows from the first time to the second; `None`: the log does not reach that far.
    Unwatched(Option<Instant>, Option<Instant>),
    /// This many beginnings and ends between two times are missing, and a flow of that time may be among them.
    Lost(Instant, Instant, u64),
    /// A flow that began before this time, when the log begins, may be missing: some were open then, and nothing shows that all of them
    /// have ended since.
    Older(Instant),
    /// A file cannot be read, for this reason.
    Unread(String),
}

/// The flows that may have had the port, and why there may be others. `living`: live flows are also known.
pub fn answer(found: Found, question: LeaseQuestion, living: bool) -> (Vec<Likely>, Vec<Doubt>) {
    let doubts = doubts(&found, question, living);
    let LeaseQuestion { from, until, slack, .. } = question;
    let mut likely: Vec<Likely> = Vec::new();
    for flow in settle(found).into_iter().filter(|flow| !flow.refused) {
        let may = flow.began - slack <= until && flow.ended.is_none_or(|ended| from <= ended + TICK + slack);
        let surely = flow.began + TICK + slack <= from && flow.ended.is_none_or(|ended| until <= ended - slack);
        if may {
            likely.push(Likely { flow, surely });
        }
    }
    likely.sort_by(|a, b| (b.surely, a.flow.began, &a.flow.pod).cmp(&(a.surely, b.flow.began, &b.flow.pod)));
    (likely, doubts)
}

/// Each flow once. The file in which a flow began lists it as open, and the one in which it ended lists it again.
fn settle(found: Found) -> Vec<Recorded> {
    let Found { spans, mut flows, .. } = found;
    let key = |flow: &Recorded| Some((flow.ticket?, flow.protocol));
    let ends = flows.iter().enumerate().filter(|(_, (_, flow))| flow.ended.is_some());
    let ends: HashMap<(u32, u8), usize> = ends.filter_map(|(index, (_, flow))| Some((key(flow)?, index))).collect();
    let mut all = Vec::new();
    for index in 0..flows.len() {
        let Some((number, mut flow)) = flows.get(index).cloned() else { break };
        if flow.ended.is_none() {
            let end = key(&flow).and_then(|key| flows.get_mut(*ends.get(&key)?));
            if let Some((_, end)) = end.filter(|(later, _)| *later > number) {
                // What was recorded first counts: by the end, the pod's name may be gone, the policy's number reused, the clock set.
                let was_open = spans.get(number).map(|span| span.until);
                let ended = end.ended.filter(|ended| flow.began <= *ended).or(was_open);
                *end = Recorded { ended, refused: end.refused, ..flow };
                continue;
            }
            // No flow survives the loss of all of a node's maps.
            let next = (number + 1..spans.len()).find(|next| spans.get(*next).is_some_and(|span| span.started));
            let last = next.and_then(|next| spans.get(next - 1));
            flow.ended = last.map(|last| last.until);
        }
        all.push(flow);
    }
    all
}

fn doubts(found: &Found, question: LeaseQuestion, living: bool) -> Vec<Doubt> {
    let Found { spans, unread, .. } = found;
    let LeaseQuestion { from, until, slack, .. } = question;
    let mut doubts = Vec::new();
    // Gaps: before the first file, before each that does not continue the one before, and after the last.
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
    // A flow is not known if its beginning is missing, and its end is missing or yet to come.
    let lost = || spans.iter().flat_map(|span| &span.lost);
    let beginning = lost().rfind(|(since, _, _)| *since <= until + slack);
    let end = lost().find(|(_, at, _)| from - slack <= *at);
    if let (Some((since, at, count)), true) = (beginning, end.is_some() || !living) {
        doubts.push(Doubt::Lost(*since, *at, *count));
    }
    for (number, why) in unread {
        let Some(span) = spans.get(*number) else { continue };
        // It covers the time until the next one begins.
        let end = spans.get(number + 1).map_or(Instant::MAX, |next| next.from);
        let covers = span.from <= until + slack && from - slack < end;
        // It also has flows that were open when the next one began.
        if covers || doubts.contains(&Doubt::Older(end)) {
            doubts.push(Doubt::Unread(why.clone()));
        }
    }
    doubts
}

/// When the recording that includes a time began, if flows from before may still be open at its end.
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
