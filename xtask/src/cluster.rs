//! `cargo xtask cluster`: runs a real Kubernetes cluster on this machine, to try Spillway and to test it.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use lab::cluster::{Cluster, Component, Kubernetes, POD_IMAGE};
use lab::oci::Image;

use crate::progress::{self, Step};
use crate::{build, image, setup, workspace};

/// The name of the interactive cluster.
const NAME: &str = "spill";
const WORKERS: u8 = 3;
const GATEWAYS: u8 = 3;

/// Run a real Kubernetes cluster with Spillway on this machine: up, down, status
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: ClusterCommand,
}

#[derive(clap::Subcommand)]
enum ClusterCommand {
    /// Start three workers, three gateways and an outside server, and install Spillway (built once, cached in target/)
    Up {
        /// Do not install Spillway
        #[arg(long)]
        bare: bool,
    },
    /// Stop the cluster, and remove everything that belongs to it or was left behind by killed tests
    Down,
    /// Show whether the cluster is up, and the state of its nodes and of Spillway
    Status,
}

/// Runs the subcommand of `args`.
pub fn run(args: &Args) -> Result<()> {
    match args.action {
        ClusterCommand::Up { bare } => up(bare),
        ClusterCommand::Down => {
            // This includes the clusters of killed tests.
            for name in lab::cluster::names()? {
                Cluster::new(&name, &binaries()?, WORKERS, GATEWAYS).down()?;
            }
            println!("The cluster is gone.");
            Ok(())
        }
        ClusterCommand::Status => status(),
    }
}

/// Returns the folder of a cluster's programs. Creates it if necessary.
pub fn binaries() -> Result<PathBuf> {
    let folder = workspace::target_dir().join("cluster/bin");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// Returns whether all programs of a cluster are built.
pub fn is_built() -> Result<bool> {
    let (sources, binaries) = (workspace::root().join("tests/cluster"), binaries()?);
    let parts = Component::ALL.into_iter().chain([Kubernetes::default().component()]);
    Ok(parts.into_iter().all(|component| component.is_built(&sources, &binaries)))
}

/// Builds KWOK unless it is built already, and returns its path.
pub fn build_kwok() -> Result<PathBuf> {
    let folder = binaries()?;
    compile([(Component::KWOK, &*folder)], Kubernetes::default())?;
    Ok(folder.join("kwok"))
}

/// Compiles the components that are not built yet, each into its folder. Removes Go's caches afterwards, which take ten times the space of
/// the programs.
fn compile<'a>(components: impl IntoIterator<Item = (Component, &'a Path)>, kubernetes: Kubernetes) -> Result<()> {
    let (sources, cache) = (workspace::root().join("tests/cluster"), workspace::target_dir().join("cluster/go"));
    for (component, into) in components.into_iter().filter(|(component, into)| !component.is_built(&sources, into)) {
        progress::run(component.title, &mut component.build(kubernetes.version(), &sources, into, &cache))?;
    }
    if cache.exists() {
        fs::remove_dir_all(&cache).with_context(|| format!("cannot remove {}", cache.display()))?;
    }
    Ok(())
}

/// Builds the programs of a cluster unless they are built already, and returns their folder.
pub fn build(kubernetes: Kubernetes) -> Result<PathBuf> {
    let binaries = binaries()?;
    let is_usual = kubernetes == Kubernetes::default();
    let folder = if is_usual { binaries.clone() } else { binaries.with_file_name(kubernetes.version()) };
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let everywhere = Component::ALL.into_iter().map(|component| (component, &*binaries));
    compile(everywhere.chain([(kubernetes.component(), &*folder)]), kubernetes)?;
    let image = Image {
        name: POD_IMAGE.to_owned(),
        architecture: image::architecture()?.to_owned(),
        files: vec![("/pod".to_owned(), binaries.join("pod"), true)],
        entrypoint: vec!["/pod".to_owned()],
        labels: Vec::new(),
    };
    image.write(&binaries.join("pod.tar"))?;
    if !is_usual {
        share(&binaries, &folder, kubernetes)?;
    }
    Ok(folder)
}

/// Links all programs except Kubernetes itself, which are the same for every version, into `folder`.
fn share(binaries: &Path, folder: &Path, kubernetes: Kubernetes) -> Result<()> {
    for entry in fs::read_dir(binaries).with_context(|| format!("cannot read {}", binaries.display()))? {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
        let shared = folder.join(&name);
        if !kubernetes.component().programs.iter().any(|own| name == **own) {
            fs::remove_file(&shared).or_else(|e| if e.kind() == ErrorKind::NotFound { Ok(()) } else { Err(e) })?;
            fs::hard_link(&path, &shared).with_context(|| format!("cannot make {}", shared.display()))?;
        }
    }
    Ok(())
}

/// Returns the interactive cluster, whether it is up or not.
pub fn the_cluster() -> Result<Cluster> {
    Ok(Cluster::new(NAME, &binaries()?, WORKERS, GATEWAYS))
}

/// Starts the interactive cluster, with Spillway unless it is `bare`.
pub fn start(bare: bool) -> Result<Cluster> {
    setup::ensure(setup::Scope::Cluster)?;
    if let Some(obstacle) = lab::skip::obstacle() {
        bail!("a cluster needs network namespaces: {obstacle}");
    }
    let missing = lab::cluster::missing();
    if !missing.is_empty() {
        bail!("this machine lacks prerequisites of a cluster:\n- {}", missing.join("\n- "));
    }
    build(Kubernetes::default())?;
    let archive = if bare { None } else { Some(image::for_tests()?) };
    let cluster = the_cluster()?;
    let step = Step::start("start Kubernetes");
    cluster.up(|what| step.at(what))?;
    step.end("✓", &format!("{} nodes ready", cluster.nodes().len()));
    if let Some(archive) = archive {
        let step = Step::start("install Spillway");
        cluster.load_image(&archive)?;
        cluster.install(&workspace::root().join("manifests"))?;
        step.end("✓", "");
    }
    Ok(cluster)
}

fn up(bare: bool) -> Result<()> {
    let cluster = start(bare)?;
    cluster.serve_outside()?;
    println!("\n{}", cluster.kubectl(&["get", "nodes", "-L", "egress,topology.kubernetes.io/zone"])?);
    hints(&cluster)
}

/// Prints commands to use with a running cluster.
pub fn hints(cluster: &Cluster) -> Result<()> {
    let egressctl = build::folder(false).join("egressctl");
    let folder = cluster.kubectl_folder(&[("kubectl-spillway", &egressctl)])?;
    println!("kubectl:  export PATH={}:$PATH", folder.display());
    println!("a pod:    kubectl run web --image {POD_IMAGE} --image-pull-policy Never");
    println!("its address outside:  kubectl exec web -- /pod ask {}:80", lab::cluster::SERVERS[0]);
    println!("all nodes:  kubectl spillway status");
    println!("logs:     {}", cluster.dir().display());
    println!("remove:   cargo xtask cluster down");
    Ok(())
}

fn status() -> Result<()> {
    let cluster = the_cluster()?;
    if !cluster.is_up() {
        println!("There is no cluster: cargo xtask cluster up");
        return Ok(());
    }
    for arguments in
        [&["get", "nodes", "-o", "wide"][..], &["get", "pods", "-A", "-o", "wide"], &["get", "spillway", "-o", "wide"]]
    {
        cluster.kubectl_command()?.args(arguments).status().context("kubectl cannot be started")?;
        println!();
    }
    Ok(())
}
