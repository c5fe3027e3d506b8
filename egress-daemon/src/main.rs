//! Temporary.
use egress_daemon::{agent, config::Config, controller, store::Files};
use std::path::PathBuf;

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let args: Vec<String> = std::env::args().collect();
    let get = |n: &str| args.iter().position(|a| a == n).and_then(|i| args.get(i + 1)).cloned();
    let config = Config::load(get("--config").map(PathBuf::from).as_deref())?;
    let dir = PathBuf::from(get("--manifests").unwrap_or_default());
    let rt = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    rt.block_on(async {
        let store = Files::open(&dir)?;
        let stop = async {
            let mut s = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
            s.recv().await;
        };
        match args[1].as_str() {
            "agent" => {
                let bpffs = PathBuf::from(get("--bpffs").unwrap_or("/sys/fs/bpf/spillway".into()));
                std::fs::create_dir_all("/run/spillway")?;
                let journal =
                    PathBuf::from(format!("/run/spillway/j{}", bpffs.display().to_string().replace('/', "-")));
                let a = agent::Agent::start(agent::Options {
                    node: get("--node").unwrap(),
                    store,
                    settings: (&config).into(),
                    bpffs,
                    journal,
                    source: String::new(),
                    publish: tokio::sync::watch::channel(Default::default()).0,
                })
                .await?;
                a.run(stop).await
            }
            _ => {
                let (tx, _rx) = tokio::sync::watch::channel(Default::default());
                controller::run(store, controller::ControllerConfig::new(format!("c{}", std::process::id())), tx, stop)
                    .await;
                Ok(())
            }
        }
    })
}
