//! Objects in which CNIs name the networks of pods. They are read where their kinds exist, and
//! never written. Only the fields that name networks are declared here.

use crate::api::IPRange;
use kube::CustomResource;
use serde::{Deserialize, Serialize};

pub mod calico {
    //! IPPool (crd.projectcalico.org/v1).
    use super::*;

    /// A network from which Calico assigns addresses.
    #[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    #[kube(group = "crd.projectcalico.org", version = "v1", kind = "IPPool", plural = "ippools", schema = "disabled")]
    #[serde(rename_all = "camelCase")]
    pub struct IPPoolSpec {
        /// The network.
        #[serde(default)]
        pub cidr: String,
        /// Whether no addresses are assigned from it.
        #[serde(default)]
        pub disabled: bool,
        /// The uses of its addresses: Workload, Tunnel, LoadBalancer; empty: Workload and Tunnel.
        #[serde(default)]
        pub allowed_uses: Vec<String>,
    }
}

pub mod cilium {
    //! CiliumNode (cilium.io/v2) and CiliumPodIPPool (cilium.io/v2alpha1).
    use super::*;

    /// Cilium's record of a node.
    #[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    #[kube(group = "cilium.io", version = "v2", kind = "CiliumNode", plural = "ciliumnodes", schema = "disabled")]
    pub struct CiliumNodeSpec {
        /// Its address management.
        #[serde(default)]
        pub ipam: Ipam,
    }

    /// A node's address management.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub struct Ipam {
        /// The networks of its pods.
        #[serde(default, rename = "podCIDRs")]
        pub pod_cidrs: Vec<String>,
    }

    /// A pool from which nodes take networks.
    #[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    #[kube(
        group = "cilium.io",
        version = "v2alpha1",
        kind = "CiliumPodIPPool",
        plural = "ciliumpodippools",
        schema = "disabled"
    )]
    pub struct CiliumPodIPPoolSpec {
        /// Its IPv4 networks.
        #[serde(default)]
        pub ipv4: Cidrs,
        /// Its IPv6 networks.
        #[serde(default)]
        pub ipv6: Cidrs,
    }

    /// Networks of one family.
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    pub struct Cidrs {
        /// The networks.
        #[serde(default)]
        pub cidrs: Vec<String>,
    }
}

pub mod antrea {
    //! IPPool (crd.antrea.io/v1beta1).
    use super::*;

    /// Addresses that Antrea assigns to pods.
    #[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    #[kube(group = "crd.antrea.io", version = "v1beta1", kind = "IPPool", plural = "ippools", schema = "disabled")]
    #[serde(rename_all = "camelCase")]
    pub struct IPPoolSpec {
        /// The addresses.
        #[serde(default)]
        pub ip_ranges: Vec<IPRange>,
    }
}

pub mod kube_ovn {
    //! Subnet (kubeovn.io/v1).
    use super::*;

    /// A network of pods.
    #[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    #[kube(group = "kubeovn.io", version = "v1", kind = "Subnet", plural = "subnets", schema = "disabled")]
    #[serde(rename_all = "camelCase")]
    pub struct SubnetSpec {
        /// The network, or one of each family, separated by a comma.
        #[serde(default)]
        pub cidr_block: String,
        /// The virtual network that it is in; empty: the cluster's own.
        #[serde(default)]
        pub vpc: String,
        /// The physical network that it is in, if any.
        #[serde(default)]
        pub vlan: String,
    }
}
