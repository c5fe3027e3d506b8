//! `egress-daemon check`: reports what this node can do, with a remedy for each problem. Changes nothing.
//!
//! `facts` inspects the node and `judge` decides; `pre` inspects a cluster and `cluster` decides. `judge` and `cluster` are pure.

mod cluster;
mod facts;
mod judge;
mod pre;

use crate::{
    config::Config,
    ctl::print::{Output, PrintError, Printable, Row, print, table},
};
use serde::Serialize;
use std::{fmt, path::Path};

/// The severity of a check's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum CheckStatus {
    /// No problem.
    Ok,
    /// The agent works, but some features do not, or something may interfere with it.
    Warn,
    /// The agent does not work.
    Fail,
}

impl fmt::Display for CheckStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CheckStatus::Ok => "ok",
            CheckStatus::Warn => "warn",
            CheckStatus::Fail => "FAIL",
        })
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckLine {
    /// What was checked: `kernel`, `btf`, `bpffs`...
    pub check: &'static str,
    /// The severity.
    pub status: CheckStatus,
    /// What was found.
    pub found: String,
    /// The remedy; null for `ok`.
    pub remedy: Option<String>,
}

impl Row for CheckLine {
    const HEADER: &'static [&'static str] = &["", "CHECK", "FOUND"];
    const NONE: &'static str = "nothing was checked";
    fn cells(&self) -> Vec<String> {
        let remedy = self.remedy.as_ref().map(|remedy| format!("\n-> {remedy}")).unwrap_or_default();
        vec![self.status.to_string(), self.check.to_owned(), format!("{}{remedy}", self.found)]
    }
}

/// The results of all checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckReport {
    /// The worst status.
    pub status: CheckStatus,
    /// The lines, in the order in which the agent needs the features that they check.
    pub items: Vec<CheckLine>,
}

impl Printable for CheckReport {
    fn text(&self) -> String {
        let count = |status| self.items.iter().filter(|line| line.status == status).count();
        let (ok, warn, fail) = (count(CheckStatus::Ok), count(CheckStatus::Warn), count(CheckStatus::Fail));
        format!("{}\n{ok} ok, {warn} warnings, {fail} failures\n", table(&self.items))
    }
}

impl CheckReport {
    fn of(items: Vec<CheckLine>) -> Self {
        Self { status: items.iter().map(|line| line.status).max().unwrap_or(CheckStatus::Ok), items }
    }

    /// Formats the report for the terminal or for a program.
    pub fn print(&self, output: Output) -> Result<String, PrintError> {
        print(self, output)
    }

    /// Returns whether the agent would not work.
    pub fn fails(&self) -> bool {
        self.status == CheckStatus::Fail
    }
}

/// Checks this node, for an agent with these settings and pins.
pub async fn run(config: &Config, bpffs: &Path) -> CheckReport {
    CheckReport::of(judge::judge(&facts::gather(config, bpffs).await, config))
}

/// Checks a cluster before Spillway is installed: the cluster of `kubeconfig`, the one that `kubectl` would use, or this pod's own.
/// Fails if the cluster does not answer.
pub async fn run_pre(config: &Config, kubeconfig: Option<&Path>) -> anyhow::Result<CheckReport> {
    Ok(CheckReport::of(cluster::judge(&pre::gather(kubeconfig).await?, config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn checking_this_machine_changes_nothing() {
        let report = run(&Config::default(), Path::new("/sys/fs/bpf/spillway-check-test")).await;
        let checks: Vec<&str> = report.items.iter().map(|line| line.check).collect();
        for check in
            ["kernel", "btf", "bpffs", "capabilities", "hooks", "tunnel", "forwarding", "interfaces", "networks"]
        {
            assert!(checks.contains(&check), "{check} is not among {checks:?}");
        }
        assert!(
            report.items.iter().all(|line| (line.status == CheckStatus::Ok) == line.remedy.is_none()),
            "{report:?}"
        );
        assert!(!Path::new("/sys/fs/bpf/spillway-check-test").exists());
        let text = report.print(Output::Table).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        let json: serde_json::Value = serde_json::from_str(&report.print(Output::Json).unwrap()).unwrap();
        assert_eq!(json["items"].as_array().map(Vec::len), Some(report.items.len()));
    }
}
