//! The demo's claims: expectation, measurement and verdict. Free of side effects.

use serde::Serialize;

use super::table::Table;

/// A statement about Spillway, and its proof.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Claim {
    /// The statement.
    pub name: String,
    /// Whether the measurement equals the expectation.
    pub holds: bool,
    /// The measurement that the claim requires.
    pub expected: String,
    /// The actual measurement.
    pub measured: String,
}

/// All claims of a run, in the order in which they were shown. `--json` prints this.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Claims {
    claims: Vec<Claim>,
}

impl Claims {
    /// Adds a claim.
    pub fn add(&mut self, claim: Claim) {
        self.claims.push(claim);
    }

    /// Returns whether there are claims and all of them hold.
    pub fn all_hold(&self) -> bool {
        !self.claims.is_empty() && self.claims.iter().all(|claim| claim.holds)
    }

    /// Returns a table with one claim per row.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&["", "claim", "expected", "measured"]).limits(&[4, 34, 30, 36]);
        for claim in &self.claims {
            table.row([if claim.holds { "PASS" } else { "FAIL" }, &claim.name, &claim.expected, &claim.measured]);
        }
        table
    }

    /// Returns a summary such as `12 of 13 claims hold`.
    pub fn line(&self) -> String {
        let holding = self.claims.iter().filter(|claim| claim.holds).count();
        format!("{holding} of {} claims hold", self.claims.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(holds: bool) -> Claim {
        Claim { name: "a".to_owned(), holds, expected: "1".to_owned(), measured: "2".to_owned() }
    }

    #[test]
    fn the_json_has_the_documented_fields() {
        let mut claims = Claims::default();
        claims.add(claim(true));
        let json = serde_json::to_value(&claims).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"claims": [{"name": "a", "holds": true, "expected": "1", "measured": "2"}]})
        );
    }

    #[test]
    fn failed_and_missing_claims_both_fail() {
        let mut claims = Claims::default();
        assert!(!claims.all_hold());
        claims.add(claim(true));
        assert!(claims.all_hold());
        claims.add(claim(false));
        assert!(!claims.all_hold());
        assert_eq!(claims.line(), "1 of 2 claims hold");
        assert!(claims.table().lines()[3].starts_with("FAIL"));
    }
}
