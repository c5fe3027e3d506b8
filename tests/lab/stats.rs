//! Statistics: whether a distribution is even, and the percentiles of a sample.

/// The order statistics of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Percentiles {
    /// The size of the sample. All values are 0 for an empty sample.
    pub count: usize,
    /// The minimum.
    pub min: f64,
    /// The median; the mean of the middle two for an even count.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The maximum.
    pub max: f64,
}

impl Percentiles {
    /// Computes the order statistics of `values` (nearest rank, except for the median).
    pub fn of(values: impl IntoIterator<Item = f64>) -> Percentiles {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else { return Percentiles::default() };
        let count = sorted.len();
        let at = |share: f64| sorted[((share * count as f64).ceil() as usize).clamp(1, count) - 1];
        let p50 = (sorted[(count - 1) / 2] + sorted[count / 2]) / 2.0;
        Percentiles { count, min, p50, p99: at(0.99), max }
    }
}

/// Computes the statistic of Pearson's chi-squared test: how far `observed` counts are from shares proportional to `weights`.
pub fn chi_squared(observed: &[u64], weights: &[f64]) -> f64 {
    assert_eq!(observed.len(), weights.len(), "one weight for each count");
    let (total, weight) = (observed.iter().sum::<u64>() as f64, weights.iter().sum::<f64>());
    let term = |(&count, &share): (&u64, &f64)| {
        let expected = total * share / weight;
        (count as f64 - expected).powi(2) / expected
    };
    observed.iter().zip(weights).map(term).sum()
}

/// Returns whether `observed` is plausible for shares proportional to `weights`: a correct distribution fails in one of a million checks.
pub fn fits(observed: &[u64], weights: &[f64]) -> bool {
    chi_squared(observed, weights) <= chi_squared_limit(observed.len().saturating_sub(1))
}

/// Returns whether `observed` [`fits`] equal shares.
pub fn is_even(observed: &[u64]) -> bool {
    fits(observed, &vec![1.0; observed.len()])
}

/// Returns the value that a chi-squared statistic exceeds with a probability of one in a million. Wilson and Hilferty's approximation is
/// up to 15 % above it for one degree of freedom, 10 % for two, and less for more.
pub fn chi_squared_limit(degrees_of_freedom: usize) -> f64 {
    const QUANTILE: f64 = 4.753_424;
    if degrees_of_freedom == 0 {
        return 0.0;
    }
    let degrees = degrees_of_freedom as f64;
    let spread = 2.0 / (9.0 * degrees);
    degrees * (1.0 - spread + QUANTILE * spread.sqrt()).powi(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chi_squared_limit_matches_published_tables() {
        for (degrees, table, error) in
            [(1, 23.928, 0.15), (2, 27.631, 0.1), (3, 30.665, 0.07), (9, 44.811, 0.03), (99, 180.792, 0.01)]
        {
            let limit = chi_squared_limit(degrees);
            assert!(limit >= table && limit / table < 1.0 + error, "{degrees}: {limit} instead of {table}");
        }
    }

    #[test]
    fn even_and_uneven_distributions_are_distinguished() {
        assert!(is_even(&[1010, 980, 1010]));
        assert!(!is_even(&[1150, 900, 950]));
        assert!(fits(&[2000, 1000], &[2.0, 1.0]));
        assert!(!fits(&[1500, 1500], &[2.0, 1.0]));
        assert!(!is_even(&[3000, 0, 0]));
    }

    #[test]
    fn percentiles_use_nearest_rank_and_median_averages_the_middle() {
        let hundred = Percentiles::of((1..=100).map(f64::from));
        assert_eq!((hundred.p50, hundred.p99, hundred.max), (50.5, 99.0, 100.0));
        assert_eq!((Percentiles::of([7.0]).p50, Percentiles::of([7.0]).p99), (7.0, 7.0));
        assert_eq!(Percentiles::of([]).count, 0);
    }
}
