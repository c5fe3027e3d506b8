//! Builds container images without Docker: an OCI layout with one layer in a tar archive, reproducible to the byte.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const BLOCK: usize = 512;

/// The contents of an image.
#[derive(Clone, Debug)]
pub struct Image {
    /// Name and tag, `ghcr.io/spillway/spillway:0.1.0`.
    pub name: String,
    /// `amd64` or `arm64`.
    pub architecture: String,
    /// The files: path in the image, source, and whether it may be executed.
    pub files: Vec<(String, PathBuf, bool)>,
    /// The program that it runs, with arguments.
    pub entrypoint: Vec<String>,
    /// Labels of its configuration.
    pub labels: Vec<(String, String)>,
}

impl Image {
    /// Writes the archive, which `ctr images import`, `podman load` and `skopeo` read.
    pub fn write(&self, archive: &Path) -> Result<()> {
        let mut layer = Tar::default();
        for (name, source, executable) in &self.files {
            let content = fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
            layer.file(name.trim_start_matches('/'), &content, if *executable { 0o755 } else { 0o644 });
        }
        let layer = layer.finish();
        let labels: serde_json::Map<String, Value> =
            self.labels.iter().map(|(key, value)| (key.clone(), Value::from(value.as_str()))).collect();
        let config = json!({
            "architecture": self.architecture,
            "os": "linux",
            "config": {"Entrypoint": self.entrypoint, "Labels": labels},
            "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
        });
        let config = config.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        entry["platform"] = json!({"architecture": self.architecture, "os": "linux"});
        let (_, tag) = self.name.rsplit_once(':').unwrap_or((&self.name, "latest"));
        entry["annotations"] = json!({"io.containerd.image.name": self.name, "org.opencontainers.image.ref.name": tag});
        let index = json!({"schemaVersion": 2, "manifests": [entry]}).to_string().into_bytes();

        let mut all = Tar::default();
        all.file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644);
        all.file("index.json", &index, 0o644);
        for blob in [&layer, &config, &manifest] {
            all.file(&format!("blobs/sha256/{}", hex(blob)), blob, 0o644);
        }
        fs::write(archive, all.finish()).with_context(|| format!("cannot write {}", archive.display()))
    }
}

fn hex(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest(content: &[u8]) -> String {
    format!("sha256:{}", hex(content))
}

fn descriptor(media_type: &str, content: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": digest(content), "size": content.len()})
}

/// A tar archive (ustar) of files that belong to root and have the modification time 0.
#[derive(Default)]
struct Tar {
    bytes: Vec<u8>,
    folders: Vec<String>,
}

impl Tar {
    fn file(&mut self, name: &str, content: &[u8], mode: u32) {
        for (at, _) in name.match_indices('/') {
            let folder = &name[..=at];
            if !self.folders.iter().any(|known| known == folder) {
                self.folders.push(folder.to_owned());
                self.header(folder, 0, 0o755, b'5');
            }
        }
        self.header(name, content.len(), mode, b'0');
        self.bytes.extend_from_slice(content);
        self.pad(BLOCK);
    }

    fn header(&mut self, name: &str, size: usize, mode: u32, kind: u8) {
        let mut header = [0_u8; BLOCK];
        let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
        put(0, name.as_bytes());
        put(100, format!("{mode:07o}\0").as_bytes());
        put(108, b"0000000\0");
        put(116, b"0000000\0");
        put(124, format!("{size:011o}\0").as_bytes());
        put(136, b"00000000000\0");
        put(148, b"        ");
        put(156, &[kind]);
        put(257, b"ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend_from_slice(&header);
    }

    fn pad(&mut self, unit: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(unit), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.bytes.write_all(&[0; 2 * BLOCK]).ok();
        self.pad(20 * BLOCK);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_is_reproducible_tar_with_blobs_named_by_digest() {
        let dir = std::env::temp_dir().join(format!("spillway-oci-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("program"), "#!/bin/sh\n").unwrap();
        let image = Image {
            name: "localhost/spillway/x:1".to_owned(),
            architecture: "amd64".to_owned(),
            files: vec![("/usr/bin/x".to_owned(), dir.join("program"), true)],
            entrypoint: vec!["/usr/bin/x".to_owned()],
            labels: Vec::new(),
        };
        image.write(&dir.join("x.tar")).unwrap();
        let script = "tar xf x.tar && cd blobs/sha256 && for f in *; do echo \"$f  $f\"; done | sha256sum --quiet -c - && \
                      for f in *; do tar tvf $f 2>/dev/null || true; done";
        let listed =
            crate::command::output(std::process::Command::new("sh").current_dir(&dir).args(["-euc", script])).unwrap();
        image.write(&dir.join("again.tar")).unwrap();
        assert_eq!(fs::read(dir.join("x.tar")).unwrap(), fs::read(dir.join("again.tar")).unwrap());
        fs::remove_dir_all(&dir).unwrap();
        assert!(listed.contains("-rwxr-xr-x 0/0") && listed.contains("usr/bin/x"), "{listed}");
    }
}
