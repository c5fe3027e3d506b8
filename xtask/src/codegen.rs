//! `cargo xtask codegen`: writes the generated manifests, or checks that they match their sources.
//!
//! egress-daemon's example `codegen` writes the CRDs and the reference of all settings into given folders. This command chooses the folders
//! and compares. It makes the Helm chart's templates from the kustomize base and its components.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{build, progress, setup, workspace};

/// The generated folders. A file there that was not generated is stale.
const GENERATED: [&str; 3] = [CRDS, TEMPLATES, REFERENCE];
/// The only handwritten file in these folders.
const HANDWRITTEN: &str = "NOTES.txt";
const CRDS: &str = "manifests/crds";
const TEMPLATES: &str = "manifests/chart/templates";
const REFERENCE: &str = "docs/reference";
/// The components of the kustomize base: the file, the condition on the values that enables it, and the template.
const COMPONENTS: [(&str, &str, &str); 4] = [
    ("cilium/rbac.yaml", "has \"cilium\" (.Values.config.foreignKinds | default list)", "foreign-cilium.yaml"),
    ("antrea/rbac.yaml", "has \"antrea\" (.Values.config.foreignKinds | default list)", "foreign-antrea.yaml"),
    ("monitoring/service-monitor.yaml", ".Values.monitoring.serviceMonitor", "service-monitor.yaml"),
    ("monitoring/rules.yaml", ".Values.monitoring.rules", "rules.yaml"),
];

#[derive(clap::Args)]
pub struct Args {
    /// Write nothing; fail if a generated file differs from its source
    #[arg(long)]
    check: bool,
}

/// Generates the files, or compares them.
pub fn run(args: &Args) -> Result<()> {
    setup::ensure(setup::Scope::Build)?;
    if args.check { check() } else { generate(&workspace::root()) }
}

/// Compares the committed files with newly generated ones.
pub fn check() -> Result<()> {
    let fresh = workspace::scratch_dir()?.join("codegen");
    if fresh.exists() {
        fs::remove_dir_all(&fresh).with_context(|| format!("cannot empty {}", fresh.display()))?;
    }
    generate(&fresh)?;
    let mut differences = Vec::new();
    for folder in GENERATED {
        differences.extend(compare(folder, &fresh.join(folder), &workspace::root().join(folder))?);
    }
    if !differences.is_empty() {
        bail!("generated manifests are out of date; run `cargo xtask codegen`:\n  {}", differences.join("\n  "));
    }
    Ok(())
}

/// Writes all generated files below `root`, laid out as in the clone.
fn generate(root: &Path) -> Result<()> {
    let crds = root.join(CRDS);
    for folder in GENERATED {
        let folder = root.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let folder = build::binaries(false)?;
    let mut generator = Command::new(folder.join("examples/codegen"));
    progress::run("generate manifests", generator.args([&crds, &root.join(REFERENCE)]))?;
    templates(&crds, root)
}

/// Writes the chart's templates below `root`. Takes the definitions from the folder `crds`.
fn templates(crds: &Path, root: &Path) -> Result<()> {
    // Skip subfolders, because other systems install their own definitions.
    for file in files(crds)?.iter().filter(|file| file.components().count() == 1) {
        let text = fs::read_to_string(crds.join(file))?;
        fs::write(root.join(TEMPLATES).join(format!("crd-{}", file.display())), definition(&text))?;
    }
    let base = workspace::root().join("manifests/base");
    for file in files(&base)?.iter().filter(|file| file.as_path() != Path::new("namespace.yaml")) {
        let text = fs::read_to_string(base.join(file)).with_context(|| format!("cannot read {}", file.display()))?;
        fs::write(root.join(TEMPLATES).join(file), template(&text))?;
    }
    for (component, wanted, file) in COMPONENTS {
        let component = workspace::root().join("manifests/components").join(component);
        let text = fs::read_to_string(&component).with_context(|| format!("cannot read {}", component.display()))?;
        fs::write(root.join(TEMPLATES).join(file), only_if(wanted, &template(&text)))?;
    }
    Ok(())
}

/// Returns a template that is empty unless the condition holds.
fn only_if(condition: &str, text: &str) -> String {
    format!("{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n")
}

/// Escapes text so that a Helm template renders it unchanged.
fn escaped(text: &str) -> String {
    text.replace("{{", "{{ \"{{\" }}")
}

/// Converts a CustomResourceDefinition to a template of the chart. Helm upgrades templates, and keeps this one, with all objects of the
/// kind, when the chart is uninstalled.
fn definition(text: &str) -> String {
    let kept = "\nmetadata:\n  annotations: {helm.sh/resource-policy: keep}\n";
    only_if(".Values.crds.install", &escaped(text).replacen("\nmetadata:\n", kept, 1))
}

/// Converts a file of the kustomize base to a template of the chart.
fn template(text: &str) -> String {
    let mut lines =
        vec!["{{- /* Generated by `cargo xtask codegen` from the kustomize manifests. Do not edit. */ -}}".to_owned()];
    let (mut component, mut in_template) = ("", false);
    for line in escaped(text).lines() {
        let (indent, rest) = line.split_at(line.len() - line.trim_start().len());
        component = match rest {
            "kind: DaemonSet" => "agent",
            "kind: Deployment" => "controller",
            _ => component,
        };
        if component_resource(rest, &lines) || component_toleration(rest, &lines) {
            continue;
        }
        let of_component = |field: &str| format!("{{{{ toJson .Values.{component}.{field} }}}}");
        match rest {
            "image: ghcr.io/spillway/spillway" => lines.push(format!(
                "{indent}image: \"{{{{ .Values.image.repository }}}}:{{{{ .Values.image.tag | default .Chart.AppVersion }}}}\""
            )),
            "imagePullPolicy: IfNotPresent" => {
                lines.push(format!("{indent}imagePullPolicy: {{{{ .Values.image.pullPolicy }}}}"));
            }
            "replicas: 2" => lines.push(format!("{indent}replicas: {{{{ .Values.controller.replicas }}}}")),
            "template:" if !component.is_empty() => {
                lines.push(line.to_owned());
                in_template = true;
            }
            _ if in_template && rest.starts_with("labels: {") => {
                in_template = false;
                lines.push(line.to_owned());
                lines.push(format!("{indent}# A change of the settings changes this checksum, so Kubernetes replaces the pods."));
                lines.push(format!("{indent}annotations: {{checksum/config: {{{{ toYaml .Values.config | sha256sum | quote }}}}}}"));
            }
            _ if rest.starts_with("serviceAccountName: ") => {
                lines.push(line.to_owned());
                lines.push("{{- with .Values.image.pullSecrets }}".to_owned());
                lines.push(format!("{indent}imagePullSecrets: {{{{ toJson . }}}}"));
                lines.push("{{- end }}".to_owned());
            }
            _ if rest.starts_with("priorityClassName: ") => {
                lines.push(format!("{indent}priorityClassName: {}", of_component("priorityClassName")));
            }
            _ if rest.starts_with("nodeSelector: ") => {
                lines.push(format!("{indent}nodeSelector: {}", of_component("nodeSelector")));
            }
            _ if rest.starts_with("tolerations:") => {
                lines.push(format!("{indent}tolerations: {}", of_component("tolerations")));
            }
            "resources:" if !component.is_empty() => lines.push(format!("{indent}resources: {}", of_component("resources"))),
            _ if rest.starts_with("args: [") => lines.push(arguments(line)),
            "config.yaml: |" => {
                lines.push(line.to_owned());
                lines.push("{{ toYaml .Values.config | indent 4 }}".to_owned());
                break;
            }
            _ => lines.push(line.to_owned()),
        }
    }
    lines.join("\n") + "\n"
}

/// Returns whether a line is one of the two below `resources:`, which the values replace.
fn component_resource(rest: &str, lines: &[String]) -> bool {
    (rest.starts_with("requests: {") || rest.starts_with("limits: {"))
        && lines.last().is_some_and(|line| line.contains("resources: {{"))
}

/// Returns whether a line is an item below `tolerations:`, which the values replace, or a comment between the items.
fn component_toleration(rest: &str, lines: &[String]) -> bool {
    (rest.starts_with("- {key: ") || rest.starts_with("# A controller on a node that is gone"))
        && lines.last().is_some_and(|line| line.contains("tolerations: {{"))
}

/// Returns the arguments of a container, with log options from the values.
fn arguments(line: &str) -> String {
    line.replace("--log=info", "\"--log={{ .Values.log.level }}\"")
        .replace("--log-format=human", "\"--log-format={{ .Values.log.format }}\"")
}

/// Returns the differences between the generated and the committed files of a folder.
fn compare(folder: &str, fresh: &Path, kept: &Path) -> Result<Vec<String>> {
    let generated = files(fresh)?;
    if generated.is_empty() {
        bail!("nothing was written into {}", fresh.display());
    }
    let mut differences = Vec::new();
    for file in &generated {
        match fs::read(kept.join(file)) {
            Ok(content) if content == fs::read(fresh.join(file))? => {}
            Ok(_) => differences.push(format!("{folder}/{} differs", file.display())),
            Err(_) => differences.push(format!("{folder}/{} is missing", file.display())),
        }
    }
    if kept.exists() {
        for file in files(kept)?.difference(&generated).filter(|file| file.as_path() != Path::new(HANDWRITTEN)) {
            differences.push(format!("{folder}/{} is not generated any more", file.display()));
        }
    }
    Ok(differences)
}

/// Returns all files below `folder`, relative to it.
fn files(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().map(PathBuf::from).unwrap_or_default();
        if path.is_dir() {
            found.extend(files(&path)?.into_iter().map(|file| name.join(file)));
        } else {
            found.insert(name);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chart_templates_match_the_kustomize_base() {
        let fresh = std::env::temp_dir().join(format!("xtask-templates-{}", std::process::id()));
        fs::create_dir_all(fresh.join(TEMPLATES)).unwrap();
        templates(&workspace::root().join(CRDS), &fresh).unwrap();
        let differences = compare(TEMPLATES, &fresh.join(TEMPLATES), &workspace::root().join(TEMPLATES)).unwrap();
        fs::remove_dir_all(&fresh).unwrap();
        assert_eq!(differences, Vec::<String>::new());
    }

    #[test]
    fn changed_missing_and_stale_files_are_named() {
        let base = std::env::temp_dir().join(format!("xtask-codegen-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = base.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for file in ["fresh/same.yaml", "kept/same.yaml", "fresh/new.yaml", "kept/old/gone.yaml"] {
            write(file, "a");
        }
        write("fresh/changed.yaml", "a");
        write("kept/changed.yaml", "b");
        let differences = compare("manifests/crds", &base.join("fresh"), &base.join("kept")).unwrap();
        fs::remove_dir_all(&base).unwrap();
        assert_eq!(
            differences,
            [
                "manifests/crds/changed.yaml differs",
                "manifests/crds/new.yaml is missing",
                "manifests/crds/old/gone.yaml is not generated any more"
            ]
        );
    }
}
