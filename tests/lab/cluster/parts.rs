//! Starts and stops the control plane and the nodes.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::text;
use super::{API_SERVER, Cluster, ClusterNode, NodeKind, PATIENCE, SERVERS};
use crate::wait::wait_for;

const INIT: &str = include_str!("node-init.sh");
const INIT_FILE: &str = "node-init.sh";
/// The address and port where etcd listens, in the API server's process.
const ETCD: &str = "127.0.0.1:2379";
const ZONES: [&str; 3] = ["a", "b", "c"];

impl Cluster {
    fn file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.dir.join(name);
        fs::create_dir_all(path.parent().unwrap_or(&self.dir))?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// Makes pods that start on a node from now on take their addresses from the network `pods`.
    pub(super) fn write_cni(&self, node: &ClusterNode, bridge: &str, pods: &str) -> Result<()> {
        let text = text::cni(bridge, pods, !self.flannel);
        self.file(&format!("{}/cni/10-lab.conflist", node.name), &text).map(drop)
    }

    /// Starts a program that outlives this process, and records its process id in `<name>.pid`.
    fn start(&self, name: &str, mut command: Command) -> Result<u32> {
        let log = File::create(self.dir.join(format!("{name}.log")))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        self.file(&format!("{name}.pid"), &child.id().to_string())?;
        Ok(child.id())
    }

    pub(super) fn start_control_plane(&self) -> Result<()> {
        self.start_first_api_server()?;
        let mut manager = self.component("controller-manager")?;
        manager.args(["--use-service-account-credentials=true", "--leader-elect=false", "--bind-address=127.0.0.1"]);
        manager.args(["--service-account-private-key-file=sa.key", "--root-ca-file=certs/apiserver.crt"]);
        self.start("controller-manager", manager)?;
        let mut scheduler = self.component("scheduler")?;
        scheduler.args(["--leader-elect=false", "--bind-address=127.0.0.1"]);
        self.start("scheduler", scheduler)?;
        // Pods are refused before it exists.
        wait_for("the default service account", PATIENCE, || Ok(self.kubectl(&["get", "sa", "default"]).is_ok()))?;
        self.apply(
            "{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: lab-proxy},
              roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: 'system:node-proxier'},
              subjects: [{kind: User, name: 'system:kube-proxy', apiGroup: rbac.authorization.k8s.io}]}",
        )
    }

    /// Starts the API server of a new cluster.
    pub(super) fn start_first_api_server(&self) -> Result<()> {
        let mut tokens = "admintoken,admin,admin,system:masters\nproxytoken,system:kube-proxy,proxy\n".to_owned();
        self.file("kubeconfig", &text::kubeconfig(API_SERVER, "admintoken"))?;
        self.file("proxy.kubeconfig", &text::kubeconfig(API_SERVER, "proxytoken"))?;
        for ClusterNode { name, .. } in &self.nodes {
            tokens += &format!("{name}token,system:node:{name},{name},system:nodes\n");
            self.file(&format!("{name}.kubeconfig"), &text::kubeconfig(API_SERVER, &format!("{name}token")))?;
        }
        self.file("tokens.csv", &tokens)?;
        let key = self.dir.join("sa.key");
        crate::command::output(Command::new("openssl").args(["genrsa", "-out"]).arg(&key).arg("2048"))?;
        self.start_api_server()
    }

    fn component(&self, name: &str) -> Result<Command> {
        let mut command = self.netns("cp")?.command(self.binaries.join("k8s"));
        command.current_dir(&self.dir).arg(name).arg("--kubeconfig=kubeconfig");
        Ok(command)
    }

    /// Starts servers in the outside that report to each client its address as seen there: port 80 of all [`SERVERS`].
    pub fn serve_outside(&self) -> Result<()> {
        let mut command = self.netns("out")?.command(self.binaries.join("pod"));
        command.arg("serve").args(SERVERS.map(|server| format!("{server}:80")));
        self.start("servers", command).map(drop)
    }

    /// Starts the API server, with etcd in the same process, and waits until it answers.
    pub fn start_api_server(&self) -> Result<()> {
        let (host, port) = API_SERVER.split_once(':').unwrap_or_default();
        let mut command = self.netns("cp")?.command(self.binaries.join("k8s"));
        command.current_dir(&self.dir).env("ETCD_DIR", &self.dir).env("ETCD_PORT", "2379");
        command.args([
            "apiserver",
            &format!("--etcd-servers=http://{ETCD}"),
            "--cert-dir=certs",
            "--allow-privileged=true",
        ]);
        command.args([format!("--secure-port={port}"), format!("--bind-address={host}")]);
        command.arg(format!("--advertise-address={host}"));
        command.args(["--service-account-key-file=sa.key", "--service-account-signing-key-file=sa.key"]);
        command.args(["--service-account-issuer=https://kubernetes.default.svc", "--token-auth-file=tokens.csv"]);
        command.args(["--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"]);
        command.args(["--service-cluster-ip-range=10.96.0.0/16", "--kubelet-preferred-address-types=InternalIP"]);
        self.file("audit.yaml", text::AUDIT)?;
        command.args(["--audit-policy-file=audit.yaml", "--audit-log-path=audit.log"]);
        self.start("apiserver", command)?;
        wait_for("the API server is ready", PATIENCE, || Ok(self.kubectl(&["get", "--raw", "/readyz"]).is_ok()))
    }

    /// Kills the API server and etcd. [`Self::start_api_server`] starts them again with the data that they had written.
    pub fn kill_api_server(&self) -> Result<()> {
        self.kill("apiserver")?;
        // A process that has just ended keeps its sockets for a moment.
        let cp = self.netns("cp")?;
        wait_for("etcd's port is free", PATIENCE, || Ok(cp.run(|| Ok(TcpListener::bind(ETCD)?)).is_ok()))
    }

    /// Stops the API server and etcd, or continues them. While stopped, they keep their connections and answer nothing.
    pub fn freeze_api_server(&self, frozen: bool) -> Result<()> {
        let pid: i32 = fs::read_to_string(self.dir.join("apiserver.pid"))?.trim().parse()?;
        let signal = if frozen { Signal::SIGSTOP } else { Signal::SIGCONT };
        kill(Pid::from_raw(pid), signal).context("cannot freeze or thaw the API server")
    }

    /// Returns the beginning of the command line of a node's first process: the script and its first arguments.
    fn init(&self, node: &str) -> String {
        format!("{} {} {node} ", self.dir.join(INIT_FILE).display(), self.dir.display())
    }

    /// Returns whether a process is this part. If the part is dead, its id may belong to another process, for example after a reboot.
    fn is_part(&self, name: &str, pid: i32) -> bool {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        // Programs that an earlier process started may be in another folder.
        let runs = |program: &str| line.contains(&format!("/{program} "));
        match name {
            "servers" => runs("pod serve"),
            "apiserver" | "controller-manager" | "scheduler" => runs(&format!("k8s {name}")),
            node => line.contains(&self.init(node)),
        }
    }

    fn kill(&self, name: &str) -> Result<()> {
        let file = self.dir.join(format!("{name}.pid"));
        if let Some(pid) = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok()) {
            if self.is_part(name, pid) {
                kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
                Self::wait_gone(pid.cast_unsigned())?;
            }
            fs::remove_file(&file)?;
        }
        Ok(())
    }

    /// Starts a node, which becomes ready by itself.
    pub fn start_node(&self, node: &ClusterNode) -> Result<()> {
        let (name, folder) = (&node.name, self.dir.join(&node.name));
        for sub in ["lib", "log", "cni"] {
            fs::create_dir_all(folder.join(sub))?;
        }
        let runc = ["/usr/sbin/runc", "/usr/bin/runc", "/usr/local/sbin/runc"].map(Path::new);
        let Some(runc) = runc.into_iter().find(|path| path.exists()) else { bail!("runc is not installed") };
        self.write_cni(node, "cni0", &node.pods())?;
        if self.flannel {
            self.file("flannel.json", text::FLANNEL)?;
        }
        self.file(&format!("{name}/containerd.toml"), &text::containerd(&self.binaries, &folder, runc))?;
        self.file(&format!("{name}/kubelet.yaml"), text::KUBELET)?;
        self.file(INIT_FILE, INIT)?;
        fs::copy(self.binaries.join("pod.tar"), self.dir.join("pod.tar"))?;
        let cgroups = self.make_cgroups(node)?;
        let mut labels = format!("topology.kubernetes.io/zone={}", ZONES[usize::from(node.of_kind - 1) % ZONES.len()]);
        if node.kind == NodeKind::Gateway {
            labels += ",egress=true";
        }
        let enter: String =
            cgroups.iter().map(|group| format!("echo $$ > {}/cgroup.procs\n", group.display())).collect();
        let script = format!(
            "{enter}exec unshare -m -p -u -i -C --fork --kill-child --propagation private bash {}{} {} {labels}",
            self.init(name),
            node.address(),
            self.binaries.display(),
        );
        let mut command = self.netns(name)?.command("/bin/bash");
        command.args(["-c", &script]);
        self.start(name, command)?;
        self.assign_pod_network(node)
    }

    /// Assigns the pods' network to a node: the CNI's configuration is written before Kubernetes could choose a network.
    fn assign_pod_network(&self, node: &ClusterNode) -> Result<()> {
        let patch = format!("{{\"spec\":{{\"podCIDR\":\"{0}\",\"podCIDRs\":[\"{0}\"]}}}}", node.pods());
        wait_for(&format!("{} registers", node.name), PATIENCE, || {
            Ok(self.kubectl(&["patch", "node", &node.name, "-p", &patch]).is_ok())
        })
    }

    /// Creates a child of this process's group in each hierarchy of cgroup v1.
    fn make_cgroups(&self, node: &ClusterNode) -> Result<Vec<PathBuf>> {
        let mut groups = Vec::new();
        for line in fs::read_to_string("/proc/self/cgroup")?.lines() {
            let [_, controllers, own] = line.splitn(3, ':').collect::<Vec<_>>()[..] else { continue };
            let hierarchy = match controllers {
                "" => continue,
                named => Path::new("/sys/fs/cgroup").join(named.trim_start_matches("name=")),
            };
            let parent = hierarchy.join(own.trim_start_matches('/'));
            let group = parent.join(self.netns_name(&node.name));
            fs::create_dir_all(&group).with_context(|| format!("cannot make {}", group.display()))?;
            if controllers == "cpuset" {
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    fs::write(group.join(file), fs::read(parent.join(file))?)?;
                }
                fs::write(group.join("cgroup.clone_children"), "1")?;
            }
            groups.push(group);
        }
        let list: String = groups.iter().map(|group| format!("{}\n", group.display())).collect();
        self.file(&format!("{}.cgroups", node.name), &list)?;
        Ok(groups)
    }

    /// Kills a node and everything on it. Its networks stay.
    pub fn kill_node(&self, name: &str) -> Result<()> {
        self.kill(&self.node(name)?.name)
    }

    /// Stops every process of a node, or continues them.
    pub fn freeze_node(&self, name: &str, frozen: bool) -> Result<()> {
        let groups = fs::read_to_string(self.dir.join(format!("{name}.cgroups")))?;
        let Some(freezer) = groups.lines().find(|group| group.contains("/freezer/")) else {
            bail!("this machine has no cgroup freezer")
        };
        Ok(fs::write(Path::new(freezer).join("freezer.state"), if frozen { "FROZEN" } else { "THAWED" })?)
    }

    /// Returns a command that runs in the mount, process and network namespaces of a node.
    pub fn on_node(&self, name: &str) -> Result<Command> {
        let outer: u32 = fs::read_to_string(self.dir.join(format!("{name}.pid")))?.trim().parse()?;
        let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"))?;
        let Some(init) = children.split_whitespace().next() else { bail!("{name} is not running") };
        let mut command = Command::new("nsenter");
        command.args(["-t", init, "-m", "-p", "-n", "-u", "-i"]).env("PATH", self.path());
        Ok(command)
    }

    fn path(&self) -> String {
        format!("{}:{}", self.binaries.display(), std::env::var("PATH").unwrap_or_default())
    }

    /// Loads an image archive into every node.
    pub fn load_image(&self, archive: &Path) -> Result<()> {
        for node in &self.nodes {
            let mut command = self.on_node(&node.name)?;
            let ctr = command.args(["ctr", "-n", "k8s.io", "images", "import", "--local"]).arg(archive);
            crate::command::output(ctr).with_context(|| format!("loading {} into {}", archive.display(), node.name))?;
        }
        Ok(())
    }

    /// Ends all processes of the cluster and removes everything that it created.
    pub fn down(&self) -> Result<()> {
        for part in ["servers", "scheduler", "controller-manager", "apiserver"] {
            self.kill(part)?;
        }
        for node in &self.nodes {
            let groups = fs::read_to_string(self.dir.join(format!("{}.cgroups", node.name))).unwrap_or_default();
            if let Some(freezer) = groups.lines().find(|group| group.contains("/freezer/")) {
                // A frozen process does not die.
                fs::write(Path::new(freezer).join("freezer.state"), "THAWED").ok();
            }
            self.kill(&node.name)?;
            for group in groups.lines().map(Path::new) {
                wait_for(&format!("{} is empty", group.display()), Duration::from_secs(20), || {
                    remove_groups(group);
                    Ok(!group.exists())
                })?;
            }
        }
        self.remove_networks();
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", self.dir.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Removes a group and the groups below it, if they are empty.
fn remove_groups(group: &Path) {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_groups(&entry.path());
    }
    fs::remove_dir(group).ok();
}
