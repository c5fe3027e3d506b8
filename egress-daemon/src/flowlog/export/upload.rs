//! Copies finished segments to a bucket of an object store. While the store is unreachable, they wait on the node, within the log's limits.

use super::{Collector, Format, Sent, bucket_and_prefix};
use crate::flowlog::files::{SEGMENT, of_kind};
use object_store::{
    Certificate, ClientOptions, ObjectStore, ObjectStoreExt as _, RetryConfig, aws::AmazonS3Builder, path::Path as Key,
};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::task::{JoinHandle, spawn_blocking};
use webpki_root_certs::TLS_SERVER_ROOT_CERTS;

/// The interval between scans for new segments.
const EVERY: Duration = Duration::from_secs(10);
/// The timeout of an upload, and the number of its retries before the next scan.
const PATIENCE: Duration = Duration::from_secs(30);
const RETRIES: usize = 2;
/// The CA certificate (PEM) of a private store, besides Mozilla's and the system's.
const CA: &str = "SPILLWAY_EXPORT_CA";

/// The running uploads, which end when this value is dropped. Missing segments are sent after the next start.
#[derive(Debug, Default)]
pub struct Uploads {
    tasks: Vec<JoinHandle<()>>,
    counts: Vec<Arc<Sent>>,
}

impl Uploads {
    /// Starts one task for each bucket among the collectors. Each folder of `directory` holds a log. Credentials, endpoint and region come
    /// from the environment (`AWS_ACCESS_KEY_ID` and so on). Fails if they are invalid.
    pub fn start(collectors: &[Collector], directory: &Path, node: &str) -> Result<Self, object_store::Error> {
        let mut uploads = Self::default();
        for collector in collectors.iter().filter(|collector| collector.format == Format::S3) {
            let (bucket, prefix) = bucket_and_prefix(&collector.address);
            let store = s3(bucket)?;
            let upload = Upload::new(Arc::new(store), Key::from(format!("{prefix}/{node}")), directory, collector);
            uploads.counts.push(Arc::clone(&upload.counts));
            uploads.tasks.push(tokio::spawn(upload.run()));
        }
        Ok(uploads)
    }

    /// Returns the numbers of sent and lost segments, for each bucket.
    pub fn counts(&self) -> Vec<Arc<Sent>> {
        self.counts.clone()
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

fn s3(bucket: &str) -> Result<impl ObjectStore, object_store::Error> {
    // Only the first installation in a process takes effect, and all install the same provider.
    rustls::crypto::ring::default_provider().install_default().ok();
    let retry = RetryConfig { max_retries: RETRIES, retry_timeout: PATIENCE, ..RetryConfig::default() };
    let mut options = ClientOptions::new().with_timeout(PATIENCE);
    // The image contains no certificates.
    for root in TLS_SERVER_ROOT_CERTS {
        options = options.with_root_certificate(Certificate::from_der(root)?);
    }
    if let Ok(pem) = std::env::var(CA) {
        options = options.with_root_certificate(Certificate::from_pem(pem.as_bytes())?);
    }
    if let Ok(allow) = std::env::var("AWS_ALLOW_HTTP") {
        options = options.with_allow_http(allow == "true");
    }
    AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry).with_client_options(options).build()
}

pub(super) struct Upload {
    store: Arc<dyn ObjectStore>,
    prefix: Key,
    directory: PathBuf,
    /// The name of the file in each log that holds the name of the last uploaded segment.
    mark: String,
    /// The segments that still wait after the last scan.
    waiting: BTreeSet<PathBuf>,
    is_away: bool,
    pub(super) counts: Arc<Sent>,
}

impl Upload {
    pub(super) fn new(store: Arc<dyn ObjectStore>, prefix: Key, directory: &Path, collector: &Collector) -> Self {
        let mark = format!("{}.uploaded", collector.address.replace('/', "_"));
        let (directory, waiting) = (directory.to_owned(), BTreeSet::new());
        Self { store, prefix, directory, mark, waiting, is_away: false, counts: Arc::new(Sent::new(collector)) }
    }

    async fn run(mut self) {
        loop {
            self.look().await;
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Sends the missing segments, the oldest first.
    pub(super) async fn look(&mut self) {
        let result = self.send_all().await;
        match result {
            Ok(()) if std::mem::take(&mut self.is_away) => {
                tracing::info!("{} accepts segments again", self.counts.collector)
            }
            Ok(()) => {}
            Err(error) if !std::mem::replace(&mut self.is_away, true) => {
                tracing::warn!("{} does not accept segments, so they wait: {error}", self.counts.collector);
            }
            Err(error) => tracing::debug!("{} still does not accept segments: {error}", self.counts.collector),
        }
    }

    async fn send_all(&mut self) -> io::Result<()> {
        let (directory, mark) = (self.directory.clone(), self.mark.clone());
        let waiting = spawn_blocking(move || waiting(&directory, &mark)).await.map_err(io::Error::other)??;
        // Segments that disappeared meanwhile exceeded the limits on age or size.
        let gone = self.waiting.difference(&waiting).count();
        self.counts.lost.fetch_add(gone as u64, Ordering::Relaxed);
        self.waiting = waiting.clone();
        for path in waiting {
            self.send(&path).await?;
            self.waiting.remove(&path);
        }
        Ok(())
    }

    async fn send(&self, path: &Path) -> io::Result<()> {
        let content = match tokio::fs::read(path).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.counts.lost.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            content => content?,
        };
        let name = |path: Option<&Path>| path.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        let (Some(log), Some(segment)) = (name(path.parent()), name(Some(path))) else { return Ok(()) };
        let key = self.prefix.clone().join(log).join(segment.as_str());
        self.store.put(&key, content.into()).await?;
        // After a crash before the mark is written, the segment is sent again under the same name.
        let (mark, part) = (path.with_file_name(&self.mark), path.with_file_name(format!("{}.part", self.mark)));
        tokio::fs::write(&part, segment).await?;
        tokio::fs::rename(part, mark).await?;
        self.counts.sent.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Returns the segments of all logs after each log's mark.
fn waiting(directory: &Path, mark: &str) -> io::Result<BTreeSet<PathBuf>> {
    let mut waiting = BTreeSet::new();
    // Nothing has been written yet.
    if !directory.exists() {
        return Ok(waiting);
    }
    for entry in directory.read_dir()? {
        let log = entry?.path();
        if !log.is_dir() {
            continue;
        }
        let last = std::fs::read_to_string(log.join(mark)).unwrap_or_default();
        let segments = of_kind(&log, SEGMENT).map_err(io::Error::other)?;
        let is_new =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().as_ref() > last.as_str());
        waiting.extend(segments.into_iter().filter(is_new));
    }
    Ok(waiting)
}
