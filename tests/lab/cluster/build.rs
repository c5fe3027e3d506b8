//! What a cluster is built from: Go modules, each pinned by the go.mod and go.sum in `tests/cluster/`.

use std::path::Path;
use std::process::{Command, Stdio};

/// The version that the API server and the kubelets say they have.
const KUBERNETES: &str = "v1.36.3";

/// One `go build`.
#[derive(Clone, Copy, Debug)]
pub struct Component {
    /// Its folder in `tests/cluster/`.
    pub folder: &'static str,
    /// What it is, and how long it takes the first time.
    pub title: &'static str,
    /// The programs that come out of it.
    pub programs: &'static [&'static str],
    packages: &'static [&'static str],
}

const CONTAINERD: &str = "github.com/containerd/containerd/v2/cmd";

impl Component {
    /// Everything, in an order in which the short ones come first.
    pub const ALL: [Component; 7] = [
        Component { folder: "pod", title: "build the pods' program", programs: &["pod"], packages: &["."] },
        Component {
            folder: "cni",
            title: "build the bridge CNI",
            programs: &["bridge", "host-local", "loopback"],
            packages: &[
                "github.com/containernetworking/plugins/plugins/main/bridge",
                "github.com/containernetworking/plugins/plugins/ipam/host-local",
                "github.com/containernetworking/plugins/plugins/main/loopback",
            ],
        },
        Component {
            folder: "containerd",
            title: "build containerd (a minute, once)",
            programs: &["containerd", "containerd-shim-runc-v2", "ctr"],
            packages: &["containerd", "containerd-shim-runc-v2", "ctr"],
        },
        // The last version all of whose modules the proxy has.
        Component {
            folder: "flannel",
            title: "build flannel (two minutes, once)",
            programs: &["flannel"],
            packages: &["github.com/flannel-io/flannel"],
        },
        // The chart is rendered by it.
        Component {
            folder: "helm",
            title: "build Helm (two minutes, once)",
            programs: &["helm"],
            packages: &["helm.sh/helm/v4/cmd/helm"],
        },
        // What takes exported logs.
        Component {
            folder: "s3",
            title: "build an S3 server (a minute, once)",
            programs: &["versitygw"],
            packages: &["github.com/versity/versitygw/cmd/versitygw"],
        },
        Component {
            folder: "k8s",
            title: "build Kubernetes (5 minutes and 4 GB, once)",
            programs: &["k8s"],
            packages: &["."],
        },
    ];

    /// Whether all of its programs are there, built from what `sources` (`tests/cluster/`) says.
    pub fn is_built(&self, sources: &Path, binaries: &Path) -> bool {
        let when = |path: &Path| path.metadata().and_then(|meta| meta.modified()).ok();
        let files = ["main.go", "go.mod", "go.sum"].map(|file| sources.join(self.folder).join(file));
        let Some(newest) = files.iter().filter_map(|file| when(file)).max() else { return false };
        self.programs.iter().all(|program| when(&binaries.join(program)).is_some_and(|built| built >= newest))
    }

    /// The command that builds it into `binaries`. Modules and objects are kept in `cache`, which may be removed afterwards.
    pub fn build(&self, sources: &Path, binaries: &Path, cache: &Path) -> Command {
        let mut command = Command::new("go");
        // flannel's oldest backend is in C, used or not.
        let c = if self.folder == "flannel" { "1" } else { "0" };
        command.current_dir(sources.join(self.folder)).env("CGO_ENABLED", c);
        // Without -modcacherw, modules are read-only, and only root can remove them.
        command.env("GOFLAGS", "-mod=readonly -modcacherw");
        command.env("GOCACHE", cache.join("objects")).env("GOMODCACHE", cache.join("modules"));
        command.arg("build").arg("-o").arg(format!("{}/", binaries.display()));
        // One setting of -trimpath for everything, or Go's cache keeps two of each.
        let version = format!("-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES}");
        command.args(["-trimpath", "-ldflags", &version]);
        for package in self.packages {
            let short = self.folder == "containerd";
            command.arg(if short { format!("{CONTAINERD}/{package}") } else { (*package).to_owned() });
        }
        command
    }
}

/// What this machine lacks to build and run a cluster, each with a remedy.
pub fn missing() -> Vec<String> {
    let mut missing = Vec::new();
    let works = |program: &str, argument: &str| {
        let status = Command::new(program).arg(argument).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if !works("go", "version") {
        missing.push("Go 1.26 or newer: https://go.dev/dl".to_owned());
    }
    for (program, argument) in [("runc", "--version"), ("iptables", "--version"), ("openssl", "version")] {
        if !works(program, argument) {
            missing.push(format!("{program}: apt-get install {program}"));
        }
    }
    if !Path::new("/sys/fs/cgroup/freezer").exists() {
        missing
            .push("cgroup v1, which the nodes are set up for: boot with systemd.unified_cgroup_hierarchy=0".to_owned());
    }
    missing
}
