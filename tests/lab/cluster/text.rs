//! The configuration files of a cluster's parts.

use std::path::Path;

/// Returns a kubeconfig with a token.
pub fn kubeconfig(server: &str, token: &str) -> String {
    format!(
        "apiVersion: v1
kind: Config
clusters: [{{name: lab, cluster: {{server: \"https://{server}\", insecure-skip-tls-verify: true}}}}]
users: [{{name: lab, user: {{token: {token}}}}}]
contexts: [{{name: lab, context: {{cluster: lab, user: lab}}}}]
current-context: lab
"
    )
}

/// Returns the bridge CNI's configuration. Like most CNIs, it masquerades packets that leave the pods' network, unless told not to.
pub fn cni(bridge: &str, subnet: &str, masquerade: bool) -> String {
    format!(
        r#"{{"cniVersion":"1.0.0","name":"lab","plugins":[{{"type":"bridge","bridge":"{bridge}","isGateway":true,"ipMasq":{masquerade},
"ipam":{{"type":"host-local","ranges":[[{{"subnet":"{subnet}"}}]],"routes":[{{"dst":"0.0.0.0/0"}}]}}}}]}}
"#
    )
}

/// flannel's configuration: the network of all pods, over VXLAN.
pub const FLANNEL: &str = r#"{"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan"}}"#;

/// Returns a configuration of containerd without features that a machine without CAP_SYS_RESOURCE refuses.
pub fn containerd(binaries: &Path, folder: &Path, runc: &Path) -> String {
    format!(
        "version = 3
root = '/var/lib/containerd'
state = '/run/containerd'
imports = []
[grpc]
  address = '/run/containerd/containerd.sock'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{POD_IMAGE}'
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['{}']
    conf_dir = '{}/cni'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = '{}'
      SystemdCgroup = false
",
        binaries.display(),
        folder.display(),
        runc.display()
    )
}

/// The image that the tests' pods run, also used for the sandbox container of every pod.
pub const POD_IMAGE: &str = "localhost/spillway/pod:1";

/// A kubelet's configuration: on cgroup v1, without eviction of pods for lack of disk space.
pub const KUBELET: &str = "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
volumePluginDir: /var/lib/kubelet/volumeplugins
registerNode: true
resolvConf: \"\"
evictionHard: {memory.available: 50Mi}
imageGCHighThresholdPercent: 100
";

/// The API server logs every request of Spillway's service accounts, and no others.
pub const AUDIT: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ['system:serviceaccounts:spillway']}
- {level: None}
";
