//! The targets, and whether a run reached them: medians of ratios that were taken round by round.

use lab::Family;

use super::figures::{BEYOND_EMPTY, Column, Figure, WITHOUT_HEADER, family_name};
use super::load::Metric;
use super::rounds::Rounds;
use super::variant::Variant::{self, Device, Direct, Plain, Stock, Vxlan};

/// A bound on a ratio.
#[derive(Clone, Copy, Debug)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

use Bound::{AtLeast, AtMost};

/// The metric, the variant, the variant that it is compared with, and the bound.
const RATIOS: [(Metric, Variant, Variant, Bound); 16] = [
    (Metric::UdpSmall, Direct, Plain, AtLeast(1.0)),
    (Metric::UdpSmall, Direct, Stock, AtLeast(2.0)),
    (Metric::UdpSmall, Vxlan, Plain, AtLeast(0.95)),
    (Metric::UdpSmall, Vxlan, Stock, AtLeast(1.9)),
    (Metric::Connections, Direct, Plain, AtLeast(0.95)),
    (Metric::Connections, Direct, Stock, AtLeast(1.5)),
    (Metric::Connections, Vxlan, Plain, AtLeast(0.95)),
    (Metric::Connections, Vxlan, Stock, AtLeast(1.5)),
    (Metric::TcpOut, Direct, Plain, AtLeast(0.97)),
    (Metric::TcpIn, Direct, Plain, AtLeast(0.97)),
    (Metric::TcpOut, Vxlan, Stock, AtLeast(1.0)),
    (Metric::TcpIn, Vxlan, Stock, AtLeast(1.0)),
    (Metric::TripP50, Direct, Plain, AtMost(1.1)),
    (Metric::TripP50, Vxlan, Plain, AtMost(1.1)),
    (Metric::TripP50, Device, Plain, AtMost(1.1)),
    (Metric::TripP99, Direct, Plain, AtMost(1.1)),
];

/// The nanoseconds that a program may cost beyond an empty one.
const PROGRAMS: [(&str, f64); 4] =
    [("pod_egress", 110.0), ("tunnel_ingress", 70.0), ("underlay_ingress", 70.0), ("uplink_ingress", 70.0)];

/// The result of one target.
#[derive(Clone, Debug)]
pub struct Reached {
    pub target: String,
    pub measured: String,
    pub holds: bool,
}

/// Returns the results of all targets that this run can judge.
pub fn judge(rounds: &Rounds, figures: &[Figure]) -> Vec<Reached> {
    let mut all = Vec::new();
    for (metric, variant, to, bound) in RATIOS {
        for family in Family::BOTH {
            let Some(ratio) = rounds.figure((metric, family)).ratio(variant, to) else { continue };
            let (sign, limit, holds) = match bound {
                AtLeast(limit) => ("≥", limit, ratio.p50 >= limit),
                AtMost(limit) => ("≤", limit, ratio.p50 <= limit),
            };
            let target = format!(
                "{}, {}: {} {sign} {limit:.2} of {}",
                metric.title().0,
                family_name(family),
                variant.name(),
                to.title()
            );
            let measured = format!("{:.2} ({:.2}–{:.2})", ratio.p50, ratio.min, ratio.max);
            all.push(Reached { target, measured, holds });
        }
    }
    for figure in figures {
        let Some(name) = figure.name.strip_suffix(BEYOND_EMPTY) else { continue };
        let Some((program, limit)) = PROGRAMS.iter().find(|(program, _)| name.starts_with(program)) else { continue };
        // The cost of a packet's first program counts in full; the bound of the others excludes the tunnel header.
        let bare = figures.iter().find(|other| other.name.strip_suffix(WITHOUT_HEADER) == Some(name));
        let bare = bare.filter(|_| *program != "pod_egress");
        for variant in figure.values.keys() {
            let bare = bare.and_then(|bare| bare.spread(*variant));
            let Some(cost) = bare.or(figure.spread(*variant)).map(|spread| spread.p50) else { continue };
            let what = if bare.is_some() { " without the tunnel's header" } else { "" };
            let target = format!("{name}, {}{what} ≤ {limit:.0} ns", variant.name());
            all.push(Reached { target, measured: format!("{cost:.0} ns"), holds: cost <= *limit });
        }
    }
    all
}
