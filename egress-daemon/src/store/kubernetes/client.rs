//! The connection to an API server: its address, the credentials, and the detection of dead connections.

use hyper_util::client::legacy::{Client as Http, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ConfigExt};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tower::{BoxError, ServiceBuilder};

/// The timeout for connecting.
const CONNECT: Duration = Duration::from_secs(2);
/// The silence after which a connection is probed, since watches may be silent for minutes.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// The interval of probes, and the number of unanswered probes after which the connection is dead.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(1);
const KEEPALIVE_MISSES: u32 = 3;

/// The reason why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig does not name a cluster.
    #[error("{} cannot be used: {error}: name a kubeconfig that kubectl works with", file.display())]
    Kubeconfig {
        /// The file.
        file: PathBuf,
        /// The defect.
        error: Box<KubeconfigError>,
    },
    /// This process is not in a pod, or its service account is not mounted.
    #[error(
        "this is not a pod with a service account ({0}): name a cluster with --kubeconfig FILE, or a directory with \
         --manifests DIR"
    )]
    NotInCluster(Box<kube::config::InClusterError>),
    /// The connection cannot be set up from the configuration.
    #[error("the connection to the API server cannot be set up: {0}: check certificates and credentials")]
    Client(Box<kube::Error>),
}

/// Returns a client for the cluster of a kubeconfig, or for the cluster in which this pod runs. Connects on first use.
pub(super) async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ConnectError> {
    match kubeconfig {
        Some(file) => connect_by(file, Kubeconfig::read_from(file), None).await,
        None => in_cluster(),
    }
}

/// Returns a client for the cluster that `kubectl` would use with these options. In a pod without a kubeconfig, that is the pod's cluster.
pub(super) async fn connect_as_kubectl(
    kubeconfig: Option<&Path>,
    context: Option<&str>,
) -> Result<Client, ConnectError> {
    if let Some(file) = kubeconfig {
        return connect_by(file, Kubeconfig::read_from(file), context).await;
    }
    match Kubeconfig::read() {
        Err(KubeconfigError::ReadConfig(..) | KubeconfigError::FindPath) if context.is_none() => in_cluster(),
        read => {
            let files = std::env::var_os("KUBECONFIG").unwrap_or_else(|| "~/.kube/config".into());
            connect_by(Path::new(&files), read, context).await
        }
    }
}

async fn connect_by(
    file: &Path,
    read: Result<Kubeconfig, KubeconfigError>,
    context: Option<&str>,
) -> Result<Client, ConnectError> {
    let failed = |error| ConnectError::Kubeconfig { file: file.to_owned(), error: Box::new(error) };
    let options = KubeConfigOptions { context: context.map(str::to_owned), ..Default::default() };
    let config = Config::from_custom_kubeconfig(read.map_err(failed)?, &options).await.map_err(failed)?;
    made(&config)
}

fn in_cluster() -> Result<Client, ConnectError> {
    made(&Config::incluster().map_err(|error| ConnectError::NotInCluster(Box::new(error)))?)
}

fn made(config: &Config) -> Result<Client, ConnectError> {
    client(config).map_err(|error| ConnectError::Client(Box::new(error)))
}

fn client(config: &Config) -> kube::Result<Client> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(CONNECT));
    http.set_keepalive(Some(KEEPALIVE));
    http.set_keepalive_interval(Some(KEEPALIVE_EVERY));
    http.set_keepalive_retries(Some(KEEPALIVE_MISSES));
    // The same limit for unacknowledged data, during which no keep-alive probes are sent.
    http.set_tcp_user_timeout(Some(KEEPALIVE + KEEPALIVE_EVERY * KEEPALIVE_MISSES));
    let https = config.rustls_https_connector_with_connector(http)?;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(Http::builder(TokioExecutor::new()).build::<_, Body>(https));
    Ok(Client::new(service, config.default_namespace.clone()))
}
