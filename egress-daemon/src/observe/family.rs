//! Metrics with their values, and their encoding.

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};
use std::fmt;

/// Labels with their values.
pub(super) type Labels = Vec<(&'static str, String)>;

/// A metric with its values.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Family {
    name: String,
    help: &'static str,
    values: Values,
}

#[derive(Clone, Debug, PartialEq)]
enum Values {
    Counters(Vec<(Labels, u64)>),
    Gauges(Vec<(Labels, f64)>),
    Histogram { buckets: Vec<(f64, u64)>, sum: f64 },
}

/// Returns a metric that only grows.
pub(super) fn counter(name: impl Into<String>, help: &'static str, values: Vec<(Labels, u64)>) -> Family {
    Family { name: name.into(), help, values: Values::Counters(values) }
}

/// Returns a metric that rises and falls.
pub(super) fn gauge(name: impl Into<String>, help: &'static str, values: Vec<(Labels, f64)>) -> Family {
    Family { name: name.into(), help, values: Values::Gauges(values) }
}

/// Converts a boolean to a value.
pub(super) fn truth(value: bool) -> f64 {
    f64::from(u8::from(value))
}

/// Returns a distribution. Each bucket has its upper bound, of which the last is infinite, and its count.
pub(super) fn histogram(name: impl Into<String>, help: &'static str, buckets: Vec<(f64, u64)>, sum: f64) -> Family {
    Family { name: name.into(), help, values: Values::Histogram { buckets, sum } }
}

impl Family {
    /// Writes the metric.
    pub(super) fn encode(self, encoder: &mut DescriptorEncoder) -> Result<(), fmt::Error> {
        let Self { name, help, values } = self;
        match values {
            Values::Counters(values) => {
                let encoder = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
                encode_values(encoder, values, ConstCounter::new)
            }
            Values::Gauges(values) => {
                let encoder = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
                encode_values(encoder, values, ConstGauge::new)
            }
            Values::Histogram { buckets, sum } => {
                let mut encoder = encoder.encode_descriptor(&name, help, None, MetricType::Histogram)?;
                let count = buckets.iter().map(|(_, count)| count).sum();
                encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
            }
        }
    }
}

/// Writes the values of one metric. A value without labels must be the only one.
fn encode_values<V, M: EncodeMetric>(
    mut encoder: MetricEncoder<'_>,
    values: Vec<(Labels, V)>,
    metric: impl Fn(V) -> M,
) -> Result<(), fmt::Error> {
    for (labels, value) in values {
        if labels.is_empty() {
            return metric(value).encode(encoder);
        }
        metric(value).encode(encoder.encode_family(&labels)?)?;
    }
    Ok(())
}
