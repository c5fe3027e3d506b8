//! All figures of a run in one form: what the JSON output, the tables and the charts are made from.

use std::collections::BTreeMap;

use lab::Family;
use serde_json::{Map, Value, json};

use super::load::Metric;
use super::programs::Cost;
use super::rounds::{Rounds, Spread};
use super::variant::Variant;

/// One line of a table.
#[derive(Clone, Debug)]
pub struct Figure {
    /// The metric, with its address family.
    pub name: String,
    /// The unit.
    pub unit: &'static str,
    /// The variants that have it.
    pub values: BTreeMap<Variant, Spread>,
}

impl Figure {
    /// A figure that was taken once for each variant.
    pub fn single(name: String, unit: &'static str, values: impl IntoIterator<Item = (Variant, f64)>) -> Figure {
        let values = values.into_iter().map(|(v, x)| (v, Spread { median: x, min: x, max: x })).collect();
        Figure { name, unit, values }
    }

    /// `{"name", "unit", "plain", "stock", "device", "vxlan", "direct", "bypass"}`, with null for a variant that does not have it.
    pub fn json(&self) -> Value {
        let mut object = Map::new();
        object.insert("name".to_owned(), json!(self.name));
        object.insert("unit".to_owned(), json!(self.unit));
        for variant in Variant::ALL {
            let value = self.values.get(&variant).map(|spread| rounded(spread.median));
            object.insert(variant.name().to_owned(), json!(value));
        }
        Value::Object(object)
    }
}

/// Four significant digits: more are noise.
pub fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

/// The family's name in tables.
pub fn family_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    }
}

/// Every figure of the rounds, in absolute terms.
pub fn absolute(rounds: &Rounds) -> Vec<Figure> {
    each(|metric, family| {
        let (name, unit) = metric.title();
        let spread = |variant| Some((variant, rounds.spread((metric, family), variant)?));
        let values = Variant::EVERY.into_iter().filter_map(spread).collect();
        Figure { name: format!("{name}, {}", family_name(family)), unit, values }
    })
}

/// Every figure of the rounds relative to one variant, round by round.
pub fn relative(rounds: &Rounds, to: Variant) -> Vec<Figure> {
    each(|metric, family| {
        let (name, _) = metric.title();
        let spread = |variant| Some((variant, rounds.ratio((metric, family), variant, to)?));
        let values = Variant::ALL.into_iter().filter_map(spread).collect();
        let unit = if to == Variant::Plain { "of plain routing" } else { "of the stock kernel" };
        Figure { name: format!("{name}, {}", family_name(family)), unit, values }
    })
}

fn each(figure: impl Fn(Metric, Family) -> Figure) -> Vec<Figure> {
    Metric::ALL.into_iter().flat_map(|metric| Family::BOTH.map(|family| figure(metric, family))).collect()
}

/// The end of the name of a program's figure from which the cost of an empty program is subtracted.
pub const BEYOND_EMPTY: &str = " (test_run, beyond an empty program)";
/// The same where the program that is subtracted has the kernel do the same with the tunnel's header.
pub const WITHOUT_HEADER: &str = " (test_run, without the tunnel's header)";

/// The programs' costs, one figure for each program, protocol and family, and one without the tunnel's header.
pub fn of_programs(costs: &BTreeMap<Variant, Vec<Cost>>) -> Vec<Figure> {
    let mut found: BTreeMap<(&str, Family, &str), BTreeMap<Variant, f64>> = BTreeMap::new();
    for (variant, costs) in costs {
        for cost in costs {
            let values = [(BEYOND_EMPTY, Some(cost.cost.whole)), (WITHOUT_HEADER, cost.cost.without_header)];
            for (beyond, value) in values.into_iter().filter_map(|(beyond, value)| Some((beyond, value?))) {
                found.entry((&cost.name, cost.family, beyond)).or_default().insert(*variant, value);
            }
        }
    }
    let figure = |((name, family, beyond), values)| {
        Figure::single(format!("{name}, {}{beyond}", family_name(family)), "ns", values)
    };
    found.into_iter().map(figure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_every_variant_and_null_for_those_without_a_value() {
        let figure =
            Figure::single("UDP".to_owned(), "kpps", [(Variant::Plain, 486.4321), (Variant::Device, 0.012345)]);
        assert_eq!(
            figure.json(),
            json!({"name": "UDP", "unit": "kpps", "plain": 486.4, "stock": null, "device": 0.01235, "vxlan": null,
                "direct": null, "bypass": null})
        );
    }
}
