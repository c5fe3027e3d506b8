//! The SVG charts: bars relative to plain routing, and curves of scaling.

use std::fmt::Write;

use lab::Family;

use super::figures::{Column, family_name};
use super::load::Metric;
use super::rounds::Rounds;
use super::scaling::{Axis, Point, SERIES};
use super::variant::Variant;

const FONT: &str = "font-family=\"sans-serif\" fill=\"#222\"";
/// The greatest ratio that is drawn to scale.
const TOP: f64 = 1.25;

/// The metrics shown as bars, with their labels.
const BARS: [(Metric, &str); 5] = [
    (Metric::UdpSmall, "UDP 64 B"),
    (Metric::Connections, "new connections"),
    (Metric::TcpOut, "TCP out"),
    (Metric::TcpIn, "TCP in"),
    (Metric::TripP50, "round trips per s"),
];

/// Returns a document with a white background, which dark pages need.
fn document(width: u32, height: u32, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n{body}</svg>\n"
    )
}

fn text(x: f64, y: f64, size: u32, anchor: &str, words: &str) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\" {FONT}>{words}</text>\n")
}

fn line(from: (f64, f64), to: (f64, f64), style: &str) -> String {
    format!("<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" {style}/>\n", from.0, from.1, to.0, to.1)
}

/// Draws bars: medians relative to plain routing, higher is better.
pub fn bars(rounds: &Rounds) -> String {
    let present: Vec<Variant> = Variant::ALL
        .into_iter()
        .filter(|v| rounds.figure((Metric::UdpSmall, Family::V4)).values.contains_key(v))
        .collect();
    let (left, base, height) = (50.0, 300.0, 230.0);
    let bar = 13.0;
    let group = bar * present.len() as f64 + 18.0;
    let width = left + group * (2 * BARS.len()) as f64 + 20.0;
    let y = |ratio: f64| base - ratio.min(TOP) / TOP * height;
    let mut body =
        text(left, 24.0, 15, "start", "Relative to plain routing without translation (medians, higher is better)");
    for ratio in [0.25, 0.5, 0.75, 1.0] {
        let style = if ratio == 1.0 { "stroke=\"#222\" stroke-dasharray=\"4 3\"" } else { "stroke=\"#ddd\"" };
        body += &line((left, y(ratio)), (width - 20.0, y(ratio)), style);
        body += &text(left - 6.0, y(ratio) + 4.0, 11, "end", &format!("{ratio}"));
    }
    for (at, (metric, name)) in BARS.into_iter().enumerate() {
        for (half, family) in Family::BOTH.into_iter().enumerate() {
            let x = left + group * (2 * at + half) as f64 + 9.0;
            for (n, variant) in present.iter().enumerate() {
                let Some(ratio) = rounds.figure((metric, family)).ratio(*variant, Variant::Plain) else { continue };
                let value = if metric.more_is_better() { ratio.p50 } else { 1.0 / ratio.p50 };
                let _ = writeln!(
                    body,
                    "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{}: {value:.2}</title></rect>",
                    x + bar * n as f64,
                    y(value),
                    bar - 2.0,
                    base - y(value),
                    variant.color(),
                    variant.title(),
                );
            }
            let middle = x + bar * present.len() as f64 / 2.0;
            body += &text(middle, base + 15.0, 11, "middle", family_name(family));
        }
        body += &text(left + group * (2 * at + 1) as f64, base + 33.0, 12, "middle", name);
    }
    body += &line((left, base), (width - 20.0, base), "stroke=\"#222\"");
    let mut x = left;
    for variant in present {
        let _ = writeln!(body, "<rect x=\"{x:.1}\" y=\"38\" width=\"11\" height=\"11\" fill=\"{}\"/>", variant.color());
        body += &text(x + 16.0, 48.0, 12, "start", variant.title());
        x += 34.0 + 7.0 * variant.title().len() as f64;
    }
    document(width as u32, 345, &body)
}

/// Draws one panel for each axis: rates relative to a count of one, on a logarithmic scale of the count.
pub fn curves(points: &[Point]) -> String {
    let (panel, height, base) = (230.0, 170.0, 235.0);
    let y = |ratio: f64| base - ratio.min(TOP) / TOP * height;
    let mut body = text(20.0, 24.0, 15, "start", "Rates relative to one of everything (medians; dashed: 15 % lost)");
    for (at, axis) in Axis::ALL.into_iter().enumerate() {
        let own: Vec<&Point> = points.iter().filter(|point| point.axis == axis).collect();
        let left = 40.0 + panel * at as f64;
        let right = left + panel - 50.0;
        let last = own.iter().map(|point| point.count).max().unwrap_or(10);
        let x = |count: u32| left + f64::from(count).log10() / f64::from(last).log10().max(0.1) * (right - left);
        for ratio in [0.5, 1.0] {
            body += &line((left, y(ratio)), (right, y(ratio)), "stroke=\"#ddd\"");
            body += &text(left - 5.0, y(ratio) + 4.0, 10, "end", &format!("{ratio}"));
        }
        body += &line((left, y(0.85)), (right, y(0.85)), "stroke=\"#c5221f\" stroke-dasharray=\"4 3\"");
        body += &line((left, base), (right, base), "stroke=\"#222\"");
        for point in &own {
            body += &text(x(point.count), base + 14.0, 10, "middle", &thousands(point.count));
        }
        body += &text(left, base + 14.0, 10, "middle", "1");
        body += &text((left + right) / 2.0, base + 32.0, 12, "middle", axis.title());
        for (one, _, color) in SERIES {
            let value = |point: &&Point| Some((point.count, point.relative.spread(one)?.p50));
            let found: Vec<(u32, f64)> = own.iter().filter_map(value).collect();
            if found.is_empty() {
                continue;
            }
            let path: Vec<String> =
                [(1, 1.0)].into_iter().chain(found).map(|(n, r)| format!("{:.1},{:.1}", x(n), y(r))).collect();
            let _ = writeln!(
                body,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>",
                path.join(" ")
            );
        }
    }
    let mut x = 20.0;
    for (_, title, color) in SERIES {
        body += &line((x, 44.0), (x + 18.0, 44.0), &format!("stroke=\"{color}\" stroke-width=\"2\""));
        body += &text(x + 24.0, 48.0, 12, "start", title);
        x += 45.0 + 6.5 * title.len() as f64;
    }
    document(20 + 4 * panel as u32, 280, &body)
}

/// Formats a count in short: 1,000,000 as 1M.
pub fn thousands(count: u32) -> String {
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 => format!("{}k", count / 1_000),
        _ => format!("{}M", count / 1_000_000),
    }
}
