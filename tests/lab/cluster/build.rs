//! The components of a cluster: Go modules, each pinned by the go.mod and go.sum in its folder of `tests/cluster/`.

use std::path::Path;
use std::process::{Command, Stdio};
use std::str::FromStr;

/// A version of Kubernetes that a cluster can run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kubernetes {
    /// The oldest version that the chart accepts.
    V1_32,
    /// The newest version, which most tests use.
    #[default]
    V1_37,
}

impl FromStr for Kubernetes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Kubernetes::V1_32, Kubernetes::V1_37];
        let named = all.into_iter().find(|one| one.version().starts_with(&format!("v{text}.")));
        named.ok_or_else(|| "write 1.32 or 1.37".to_owned())
    }
}

impl Kubernetes {
    /// Returns the version, as the API server and the kubelets report it.
    pub const fn version(self) -> &'static str {
        match self {
            Kubernetes::V1_32 => "v1.32.2",
            Kubernetes::V1_37 => "v1.37.1",
        }
    }

    /// Returns the base name of the files that pin its modules (extensions `mod` and `sum`).
    const fn modules(self) -> &'static str {
        match self {
            Kubernetes::V1_32 => "go.1.32",
            Kubernetes::V1_37 => "go",
        }
    }

    /// Returns the component that builds it.
    pub const fn component(self) -> Component {
        Component {
            folder: "k8s",
            modules: self.modules(),
            title: match self {
                Kubernetes::V1_32 => "build Kubernetes 1.32 (5 minutes and 4 GB, once)",
                Kubernetes::V1_37 => "build Kubernetes (5 minutes and 4 GB, once)",
            },
            // kubectl is a separate program: the tests start it more than a thousand times, and a smaller program starts faster.
            programs: &["k8s", "kubectl"],
            packages: &[".", "k8s.io/kubernetes/cmd/kubectl"],
        }
    }
}

/// One `go build`.
#[derive(Clone, Copy, Debug)]
pub struct Component {
    /// Its folder in `tests/cluster/`.
    pub folder: &'static str,
    modules: &'static str,
    /// A description, with the duration of the first build.
    pub title: &'static str,
    /// The programs that it produces.
    pub programs: &'static [&'static str],
    packages: &'static [&'static str],
}

const CONTAINERD: &str = "github.com/containerd/containerd/v2/cmd";

impl Component {
    /// All components except Kubernetes, those that build quickly first.
    pub const ALL: [Component; 6] = [
        Component {
            folder: "pod",
            modules: "go",
            title: "build the pods' program",
            programs: &["pod"],
            packages: &["."],
        },
        Component {
            folder: "cni",
            modules: "go",
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
            modules: "go",
            title: "build containerd (a minute, once)",
            programs: &["containerd", "containerd-shim-runc-v2", "ctr"],
            packages: &["containerd", "containerd-shim-runc-v2", "ctr"],
        },
        // The last version whose modules are all on the proxy.
        Component {
            folder: "flannel",
            modules: "go",
            title: "build flannel (two minutes, once)",
            programs: &["flannel"],
            packages: &["github.com/flannel-io/flannel"],
        },
        // Renders the chart.
        Component {
            folder: "helm",
            modules: "go",
            title: "build Helm (two minutes, once)",
            programs: &["helm"],
            packages: &["helm.sh/helm/v4/cmd/helm"],
        },
        // Receives exported logs.
        Component {
            folder: "s3",
            modules: "go",
            title: "build an S3 server (a minute, once)",
            programs: &["versitygw"],
            packages: &["github.com/versity/versitygw/cmd/versitygw"],
        },
    ];

    /// Simulates the kubelets of nodes without machines (`cargo xtask bench --scale`).
    pub const KWOK: Component = Component {
        folder: "kwok",
        modules: "go",
        title: "build KWOK (a minute, once)",
        programs: &["kwok"],
        packages: &["sigs.k8s.io/kwok/cmd/kwok"],
    };

    /// Returns whether all programs exist and are not older than the pins and main.go in `sources` (`tests/cluster/`).
    pub fn is_built(&self, sources: &Path, binaries: &Path) -> bool {
        let when = |path: &Path| path.metadata().and_then(|meta| meta.modified()).ok();
        let pins = ["mod", "sum"].map(|ending| format!("{}.{ending}", self.modules));
        let files = ["main.go", &pins[0], &pins[1]].map(|file| sources.join(self.folder).join(file));
        let Some(newest) = files.iter().filter_map(|file| when(file)).max() else { return false };
        self.programs.iter().all(|program| when(&binaries.join(program)).is_some_and(|built| built >= newest))
    }

    /// Returns the command that builds the component into `binaries`. `version` is the version that Kubernetes reports.
    /// Modules and objects are kept in `cache`, which may be removed afterwards.
    pub fn build(&self, version: &str, sources: &Path, binaries: &Path, cache: &Path) -> Command {
        let mut command = Command::new("go");
        // flannel's oldest backend needs C, used or not. With the tags below, packages shared with other components still compile once.
        let c = if self.folder == "flannel" { "1" } else { "0" };
        command.current_dir(sources.join(self.folder)).env("CGO_ENABLED", c);
        // With the default of 100, the compiler spends a sixth of its time on garbage collection.
        command.env("GOGC", "400");
        // Without -modcacherw, modules are read-only, and only root can remove them.
        command.env("GOFLAGS", "-mod=readonly -modcacherw");
        command.env("GOCACHE", cache.join("objects")).env("GOMODCACHE", cache.join("modules"));
        command.args(["build", "-tags", "netgo,osusergo", "-o"]).arg(format!("{}/", binaries.display()));
        // All components share one -trimpath setting: otherwise, Go's cache would keep two copies of each object.
        let version = format!("-s -w -X k8s.io/component-base/version.gitVersion={version}");
        command.args(["-trimpath", "-ldflags", &version, "-modfile", &format!("{}.mod", self.modules)]);
        // The programs run only for minutes: inlining and debug information, a third of the compile time, would not pay off.
        command.arg("-gcflags=all=-l -dwarf=false");
        for package in self.packages {
            let short = self.folder == "containerd";
            command.arg(if short { format!("{CONTAINERD}/{package}") } else { (*package).to_owned() });
        }
        command
    }
}

/// Returns the prerequisites for building and running a cluster that this machine lacks, each with a remedy.
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
        missing.push("cgroup v1, which the nodes require: boot with systemd.unified_cgroup_hierarchy=0".to_owned());
    }
    missing
}
