//! The networks that no policy touches, beyond what the objects say.

use super::Agent;
use egress_core::{
    agent::unnamed::{Circumstances, Networks, Unnamed},
    network::reported::on_dummies,
};
use ipnet::IpNet;

/// What is left alone besides what the objects say.
#[derive(Default)]
pub(super) struct LeftAlone {
    unnamed: Unnamed,
    /// Networks that may be the cluster's and that nobody names.
    pub(super) found: Networks,
    /// They, what the administrator says, and what this node has on dummy devices.
    pub(super) all: Vec<IpNet>,
}

impl Agent {
    /// Looks which networks are to be left alone now.
    pub(super) fn find_networks(&mut self) {
        let except_cidrs = &self.settings.except_cidrs;
        self.left_alone.found = self.left_alone.unnamed.update(&Circumstances {
            node: &self.node,
            snapshot: &self.world.snapshot,
            except_cidrs,
            api_server: self.settings.api_server,
            now: self.start.elapsed(),
        });
        let told = except_cidrs.iter().chain(self.left_alone.found.keys()).copied();
        // Most of them are no addresses that the node tells of.
        self.left_alone.all = told.chain(on_dummies(&self.links.current())).collect();
    }
}
