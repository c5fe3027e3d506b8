//! The agent's local socket. `GET /state` returns the last published [`AgentState`]; other parts of the agent have their own paths.
//!
//! Only root may use the socket (mode 0600). The server only reads the published state. The client, for `egressctl`, is
//! blocking, small and bounded in time.

use super::state::AgentState;
use axum::{Json, Router, extract::State, routing::get};
use std::{
    fs, io,
    io::{BufRead as _, BufReader, Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use thiserror::Error;
use tokio::{net::UnixListener, sync::watch, task::JoinSet};

/// The published state. It is cheap to replace, because readers share one value.
pub type Published = watch::Receiver<Arc<AgentState>>;

/// A client's timeout for an agent that has the socket open but does not answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// The maximum size of an answer that a client accepts, in bytes.
const LARGEST: u64 = 256 << 20;

/// Why the socket cannot be opened.
#[derive(Debug, Error)]
#[error("the socket {} cannot be opened: {source}; egressctl will show the maps only", path.display())]
pub struct ServeError {
    path: PathBuf,
    source: io::Error,
}

/// The server of the socket. Dropping it ends it and removes the socket file.
#[derive(Debug)]
pub struct AdminServer {
    path: PathBuf,
    _task: JoinSet<()>,
}

impl AdminServer {
    /// Starts to serve the state and `others` on the socket. The caller holds the agent's lock, so an existing socket belongs
    /// to a dead agent.
    pub fn start(path: &Path, published: Published, others: Router) -> Result<Self, ServeError> {
        let failed = |source| ServeError { path: path.to_path_buf(), source };
        let listener = listen(path).map_err(failed)?;
        let routes = Router::new().route("/state", get(state)).with_state(published).merge(others);
        let mut task = JoinSet::new();
        task.spawn(async move {
            // This never returns, because errors of single connections do not end it.
            let _ = axum::serve(listener, routes).await;
        });
        Ok(Self { path: path.to_path_buf(), _task: task })
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        // A missing socket is not an error.
        let _ = fs::remove_file(&self.path);
    }
}

/// Binds the socket under another name and renames it, so that it never exists with wider permissions and replaces a dead agent's socket.
fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let new = path.with_extension("new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&new)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
    fs::rename(&new, path)?;
    Ok(listener)
}

async fn state(State(published): State<Published>) -> Json<AgentState> {
    let state = published.borrow().clone();
    Json(AgentState::clone(&state))
}

/// Why an agent's state cannot be read.
#[derive(Debug, Error)]
pub enum AskError {
    /// No agent listens.
    #[error("no agent answers at {}: {source}", path.display())]
    Silent {
        /// The socket.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The answer is not that of an agent of this version.
    #[error("the answer of the agent at {} cannot be parsed: {message}", path.display())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// The problem.
        message: String,
    },
}

/// Asks the agent at the socket for its state. Each read or write blocks for two seconds at most.
pub fn ask(path: &Path) -> Result<AgentState, AskError> {
    let exchange = || -> io::Result<Vec<u8>> {
        let mut answer = Vec::new();
        request(path, "/state", PATIENCE)?.take(LARGEST).read_to_end(&mut answer)?;
        Ok(answer)
    };
    let answer = exchange().map_err(|source| AskError::Silent { path: path.to_path_buf(), source })?;
    understand(&answer).map_err(|message| AskError::Answer { path: path.to_path_buf(), message })
}

/// Sends a request. Each part of the answer must arrive within `patience`.
fn request(path: &Path, what: &str, patience: Duration) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // With HTTP/1.0, the answer is not chunked and ends with the connection.
    stream.write_all(format!("GET {what} HTTP/1.0\r\nHost: agent\r\n\r\n").as_bytes())?;
    Ok(stream)
}

/// Asks the agent at the socket for lines, until the agent or the reader ends. Each line must arrive within `patience`. A refusal is
/// returned as an error with its text.
pub fn follow(
    path: &Path,
    what: &str,
    patience: Duration,
) -> Result<impl Iterator<Item = io::Result<String>> + use<>, AskError> {
    let silent = |source| AskError::Silent { path: path.to_path_buf(), source };
    let mut reader = BufReader::new(request(path, what, patience).map_err(silent)?);
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).map(|_| line.trim_end().to_owned())
    };
    let status = line().map_err(silent)?;
    while !line().map_err(silent)?.is_empty() {}
    if status.split(' ').nth(1) == Some("200") {
        return Ok(reader.lines());
    }
    let mut message = String::new();
    reader.take(LARGEST).read_to_string(&mut message).map_err(silent)?;
    Err(AskError::Answer { path: path.to_path_buf(), message: if message.is_empty() { status } else { message } })
}

fn understand(answer: &[u8]) -> Result<AgentState, String> {
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").ok_or("it is cut off")?;
    let head = String::from_utf8_lossy(&answer[..end]).into_owned();
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(format!("its status is {status:?}"));
    }
    serde_json::from_slice(&answer[end + 4..]).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::state::{GatewayState, NodeState, ProbeResult};

    fn example() -> AgentState {
        let gateway = GatewayState {
            name: "gw1".into(),
            address: "10.1.0.1".parse().ok(),
            probe: ProbeResult::Alive,
            rtt_micros: Some(120),
            transport: "device".into(),
            ..GatewayState::default()
        };
        let node = NodeState { name: "worker1".into(), pid: 7, ..NodeState::default() };
        AgentState { node, gateways: vec![gateway], ..AgentState::default() }
    }

    async fn ask_aside(path: &Path) -> Result<AgentState, AskError> {
        let path = path.to_path_buf();
        tokio::task::spawn_blocking(move || ask(&path)).await.unwrap()
    }

    #[tokio::test]
    async fn a_published_state_is_read_back_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run").join("a.sock");
        let (publish, published) = watch::channel(Arc::new(AgentState::default()));
        let server = AdminServer::start(&path, published, Router::new()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(ask_aside(&path).await.unwrap(), AgentState::default());
        publish.send(Arc::new(example())).unwrap();
        assert_eq!(ask_aside(&path).await.unwrap(), example());
        drop(server);
        assert!(!path.exists());
        assert!(matches!(ask_aside(&path).await, Err(AskError::Silent { .. })));
    }

    #[tokio::test]
    async fn the_socket_of_a_dead_agent_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(matches!(ask_aside(&path).await, Err(AskError::Silent { .. })));
        let (_publish, published) = watch::channel(Arc::new(example()));
        let _server = AdminServer::start(&path, published, Router::new()).unwrap();
        assert_eq!(ask_aside(&path).await.unwrap(), example());
    }

    #[test]
    fn answers_that_are_not_an_agents_are_refused() {
        for (answer, part) in
            [("", "cut off"), ("HTTP/1.0 404 Not Found\r\n\r\n", "404"), ("HTTP/1.0 200 OK\r\n\r\n7", "invalid type")]
        {
            let error = understand(answer.as_bytes()).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn fields_of_another_version_are_ignored_and_missing_ones_have_defaults() {
        let state = understand(b"HTTP/1.0 200 OK\r\nx: y\r\n\r\n{\"node\": {\"name\": \"w\", \"new\": 1}}").unwrap();
        assert_eq!(state.node.name, "w");
        assert_eq!(state.policies, []);
    }
}
