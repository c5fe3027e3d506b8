//! Tests of the segments that a bucket receives, and of segments that it does not accept.

use super::upload::Upload;
use super::*;
use futures::TryStreamExt as _;
use object_store::{ObjectStore as _, ObjectStoreExt as _, local::LocalFileSystem, path::Path as Key};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn upload(logs: &Path, bucket: &Path) -> Upload {
    let collector: Collector = "s3://logs/egress".parse().unwrap();
    let store = LocalFileSystem::new_with_prefix(bucket).unwrap();
    Upload::new(Arc::new(store), Key::from("egress/w1"), logs, &collector)
}

async fn keys(bucket: &Path) -> Vec<String> {
    let store = LocalFileSystem::new_with_prefix(bucket).unwrap();
    let mut keys: Vec<String> =
        store.list(None).map_ok(|object| object.location.to_string()).try_collect().await.unwrap();
    keys.sort();
    keys
}

#[tokio::test]
async fn segments_are_uploaded_once_across_restarts_and_vanished_ones_counted() {
    let (logs, bucket) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = |name: &str| logs.path().join(name);
    let mut first = upload(&file("none"), bucket.path());
    first.look().await;
    assert!(keys(bucket.path()).await.is_empty());

    for log in ["leases", "flows"] {
        fs::create_dir(file(log)).unwrap();
        for name in ["1.parquet", "2.parquet", "3.journal"] {
            fs::write(file(log).join(name), name).unwrap();
        }
    }
    let mut first = upload(logs.path(), bucket.path());
    first.look().await;
    let all = ["flows/1", "flows/2", "leases/1", "leases/2"].map(|name| format!("egress/w1/{name}.parquet"));
    assert_eq!(keys(bucket.path()).await, all);
    assert_eq!(first.counts.sent.load(Ordering::Relaxed), 4);

    // Only new segments are sent, not those that were sent before.
    let store = LocalFileSystem::new_with_prefix(bucket.path()).unwrap();
    store.delete(&Key::from("egress/w1/flows/1.parquet")).await.unwrap();
    fs::write(file("flows/3.parquet"), "3").unwrap();
    let mut second = upload(logs.path(), bucket.path());
    second.look().await;
    assert_eq!(second.counts.sent.load(Ordering::Relaxed), 1);
    assert_eq!(keys(bucket.path()).await.first().map(String::as_str), Some("egress/w1/flows/2.parquet"));

    // The store is unreachable, and a segment gets too old meanwhile.
    let away = bucket.path().join("egress");
    fs::rename(&away, bucket.path().join("moved")).unwrap();
    fs::write(&away, "no directory").unwrap();
    fs::write(file("flows/4.parquet"), "4").unwrap();
    fs::write(file("flows/5.parquet"), "5").unwrap();
    second.look().await;
    fs::remove_file(file("flows/4.parquet")).unwrap();
    second.look().await;
    assert_eq!((second.counts.sent.load(Ordering::Relaxed), second.counts.lost.load(Ordering::Relaxed)), (1, 1));
    fs::remove_file(&away).unwrap();
    fs::rename(bucket.path().join("moved"), away).unwrap();
    second.look().await;
    assert_eq!((second.counts.sent.load(Ordering::Relaxed), second.counts.lost.load(Ordering::Relaxed)), (2, 1));
    assert!(keys(bucket.path()).await.contains(&"egress/w1/flows/5.parquet".to_owned()));
}
