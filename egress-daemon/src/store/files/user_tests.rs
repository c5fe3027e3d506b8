//! Tests of the version of a file that is in force, with the tests' own clock and texts.

use super::parse::{Parser, is_name};
use super::user::{GRACE, Now, REST, Stamp, Texts, UserFiles};
use proptest::prelude::*;
use serde_json::json;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, SystemTime};

thread_local! {
    static PARSER: Rc<Parser> = Rc::new(Parser::new().unwrap());
}

/// A directory and a clock.
struct DirectoryFixture {
    parser: Rc<Parser>,
    now: Duration,
    files: BTreeMap<PathBuf, (Vec<u8>, Stamp)>,
    good: RefCell<BTreeMap<PathBuf, Vec<u8>>>,
    state: UserFiles,
    again: Option<Duration>,
}

impl Texts for (&BTreeMap<PathBuf, (Vec<u8>, Stamp)>, &RefCell<BTreeMap<PathBuf, Vec<u8>>>) {
    fn read(&self, file: &Path) -> io::Result<(Vec<u8>, Stamp)> {
        self.0.get(file).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
    fn last_good(&self, file: &Path) -> Option<Vec<u8>> {
        self.1.borrow().get(file).cloned()
    }
    fn keep_good(&self, file: &Path, text: Option<&[u8]>) {
        match text {
            Some(text) => drop(self.1.borrow_mut().insert(file.to_owned(), text.to_owned())),
            None => drop(self.1.borrow_mut().remove(file)),
        }
    }
}

impl DirectoryFixture {
    fn new() -> Self {
        DirectoryFixture {
            parser: PARSER.with(Rc::clone),
            now: Duration::from_secs(1000),
            files: BTreeMap::new(),
            good: RefCell::default(),
            state: UserFiles::default(),
            again: None,
        }
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000) + self.now
    }

    fn write(&mut self, path: &str, text: impl AsRef<[u8]>) {
        let text = text.as_ref().to_vec();
        let stamp = Stamp { modified: self.wall(), size: text.len() as u64, inode: 1 };
        self.files.insert(path.into(), (text, stamp));
    }

    fn look(&mut self) {
        let listing = self.files.iter().map(|(path, (_, stamp))| (path.clone(), *stamp)).collect();
        let now = Now { monotonic: self.now, wall: self.wall() };
        self.again = self.state.update(&listing, now, &self.parser, &(&self.files, &self.good)).again;
    }

    /// Scans, and repeats the scan as long as the state requests it.
    fn settle(&mut self) {
        self.look();
        while let Some(again) = self.again {
            self.now = again;
            self.look();
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.look();
    }

    fn names(&self) -> Vec<String> {
        self.state.objects().map(|object| object.target.key.to_string()).collect()
    }

    fn label(&self, name: &str) -> Option<String> {
        let object = self.state.objects().find(|object| object.target.key.name == name)?;
        object.object.value().pointer("/metadata/labels/v")?.as_str().map(str::to_owned)
    }

    fn problems(&self) -> Vec<String> {
        self.state.problems().iter().map(ToString::to_string).collect()
    }
}

fn node(name: &str, version: &str) -> String {
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "labels": { "v": version } } }).to_string()
}

#[test]
fn a_file_is_read_only_after_it_has_stopped_changing() {
    let mut world = DirectoryFixture::new();
    world.write("a.yaml", node("a", "1"));
    world.settle();
    for step in 0..20 {
        world.write("a.yaml", format!("{} # {}", node("a", "2"), "x".repeat(step)));
        world.pass(REST / 2);
        assert_eq!(world.label("a").as_deref(), Some("1"));
    }
    world.pass(REST);
    assert_eq!(world.label("a").as_deref(), Some("2"));
}

#[test]
fn a_half_written_file_never_counts() {
    let text = format!("---\n{}\n---\n{}\n", node("a", "2"), node("b", "2"));
    let mut world = DirectoryFixture::new();
    world.write("a.yaml", text.replace("\"2\"", "\"1\""));
    world.settle();
    for end in 0..text.len() {
        world.write("a.yaml", &text[..end]);
        world.pass(Duration::from_millis(1));
        assert_eq!((world.label("a").as_deref(), world.label("b").as_deref()), (Some("1"), Some("1")));
        assert_eq!(world.problems(), Vec::<String>::new());
    }
    world.write("a.yaml", &text);
    world.settle();
    assert_eq!((world.label("a").as_deref(), world.label("b").as_deref()), (Some("2"), Some("2")));
}

#[test]
fn a_file_that_stopped_changing_long_ago_is_read_at_once() {
    let mut world = DirectoryFixture::new();
    world.write("a.yaml", node("a", "1"));
    world.now += REST;
    world.look();
    assert_eq!(world.label("a").as_deref(), Some("1"));
    assert_eq!(world.again, None);
}

#[test]
fn a_file_dated_in_the_future_is_only_read_later() {
    let mut world = DirectoryFixture::new();
    world.write("a.yaml", node("a", "1"));
    if let Some((_, stamp)) = world.files.get_mut(Path::new("a.yaml")) {
        stamp.modified += Duration::from_secs(3600);
    }
    world.settle();
    assert_eq!(world.label("a").as_deref(), Some("1"));
}

#[test]
fn a_file_that_vanishes_for_a_moment_keeps_its_objects() {
    let mut world = DirectoryFixture::new();
    world.write("a.yaml", node("a", "1"));
    world.settle();
    let file = world.files.remove(Path::new("a.yaml")).unwrap();
    world.look();
    world.pass(GRACE / 2);
    assert_eq!(world.names(), ["a"]);
    world.files.insert("a.yaml".into(), file);
    world.settle();
    assert_eq!(world.names(), ["a"]);
    world.files.clear();
    world.settle();
    assert_eq!(world.names(), Vec::<String>::new());
    assert!(world.good.borrow().is_empty());
}

#[test]
fn a_file_that_moves_keeps_its_objects_throughout_without_a_problem() {
    let mut world = DirectoryFixture::new();
    world.write("b.yaml", node("a", "1"));
    world.settle();
    for target in ["c.yaml", "a.yaml"] {
        let (_, file) = world.files.pop_first().unwrap();
        world.files.insert(target.into(), file);
        world.look();
        assert_eq!((world.names(), world.problems()), (vec!["a".to_owned()], vec![]));
        world.settle();
        assert_eq!((world.names(), world.problems()), (vec!["a".to_owned()], vec![]));
    }
}

#[test]
fn a_broken_document_keeps_its_object_and_the_others_change() {
    let mut world = DirectoryFixture::new();
    world.write("a.yaml", format!("{}\n---\n{}", node("a", "1"), node("b", "1")));
    world.settle();
    world.write("a.yaml", format!("{}\n---\n{}", node("a", "2"), node("b", "2").replace("metadata", "metadate")));
    world.settle();
    assert_eq!((world.label("a").as_deref(), world.label("b").as_deref()), (Some("2"), Some("1")));
    assert_eq!(
        world.problems(),
        [
            "a.yaml, document 2, metadata.name: \"\" is not a name: write 1 to 253 lower-case letters, digits, - and ., with \
          a letter or digit at both ends"
        ]
    );
}

#[test]
fn a_new_process_takes_the_last_good_version_of_a_broken_file() {
    let mut world = DirectoryFixture::new();
    world.write("a.yaml", node("a", "1"));
    world.settle();
    world.write("a.yaml", "{");
    world.state = UserFiles::default();
    world.settle();
    assert_eq!(world.label("a").as_deref(), Some("1"));
    assert_eq!(world.problems().len(), 1);
}

#[test]
fn an_object_in_two_files_stays_with_the_file_that_had_it_first() {
    let mut world = DirectoryFixture::new();
    world.write("b.yaml", node("a", "1"));
    world.settle();
    world.write("a.yaml", node("a", "2"));
    world.settle();
    assert_eq!(world.label("a").as_deref(), Some("1"));
    assert_eq!(
        world.problems(),
        ["a.yaml, document 1, Node a: b.yaml defines this object too, and its version is in force: remove the object \
          from one of the files"]
    );
    world.files.remove(Path::new("b.yaml"));
    world.look();
    assert_eq!((world.label("a").as_deref(), world.problems()), (Some("2"), vec![]));
}

#[test]
fn an_object_twice_in_one_file_is_the_first() {
    let mut world = DirectoryFixture::new();
    world.write("a.yaml", format!("{}\n---\n{}", node("a", "1"), node("a", "2")));
    world.settle();
    assert_eq!(world.label("a").as_deref(), Some("1"));
    assert_eq!(
        world.problems(),
        [
            "a.yaml, document 2, Node a: document 1 of the same file defines this object too, and is in force: remove one of \
          them"
        ]
    );
}

/// `helm template > a.yaml` empties the file before it writes. If helm fails, the file stays empty.
#[test]
fn an_emptied_file_keeps_its_objects_until_it_is_removed() {
    for empty in ["", "# nothing\n", "{apiVersion: v1, kind: List, items: []}"] {
        let mut world = DirectoryFixture::new();
        world.write("a.yaml", node("a", "1"));
        world.settle();
        world.write("a.yaml", empty);
        world.settle();
        let problem = "a.yaml: the file no longer has objects: remove it if its objects should go; until then its last good version \
                       stays in force";
        assert_eq!((world.names(), world.problems()), (vec!["a".to_owned()], vec![problem.to_owned()]), "{empty}");
        // A new process knows the last good version, too.
        world.state = UserFiles::default();
        world.settle();
        assert_eq!((world.names(), world.problems()), (vec!["a".to_owned()], vec![problem.to_owned()]), "{empty}");
        world.files.remove(Path::new("a.yaml"));
        // One that never had objects is in order.
        world.write("b.yaml", empty);
        world.settle();
        assert_eq!((world.names(), world.problems()), (vec![], vec![]), "{empty}");
    }
}

fn parsed(text: impl AsRef<[u8]>) -> (Vec<String>, Vec<String>) {
    let (objects, problems) = PARSER.with(|parser| parser.parse(Path::new("f.yaml"), text.as_ref()));
    (
        objects.iter().map(|object| object.target.to_string()).collect(),
        problems.iter().map(ToString::to_string).collect(),
    )
}

#[test]
fn documents_that_are_no_user_objects_are_refused_with_a_hint() {
    for (text, problem) in [
        (
            "just text",
            "f.yaml, document 1: this is not an object: write a map with apiVersion, kind, metadata and spec",
        ),
        (
            "kind: Deployment",
            "f.yaml, document 1, kind: unknown kind \"Deployment\": the kinds here are CiliumEgressGatewayPolicy, \
             CiliumNode, CiliumPodIPPool, Egress, EgressGatewayPolicy, EgressIPPool, EgressPolicy, ExternalIPPool, IPPool, Namespace, Node, Pod, \
             ServiceCIDR, Subnet; keep other objects in another directory",
        ),
        (
            "kind: EgressIP",
            "f.yaml, document 1, kind: Spillway writes objects of the kind EgressIP itself: remove it from the file",
        ),
        (
            "{kind: Pod, apiVersion: v2}",
            "f.yaml, document 1, apiVersion: Pod has no version \"v2\": write apiVersion: v1",
        ),
        (
            "{kind: Node, apiVersion: v1, metadata: {name: a, namespace: b}}",
            "f.yaml, document 1, metadata.namespace: objects of the kind Node have no namespace: remove the field",
        ),
        (
            "{kind: Node, apiVersion: v1, metadata: {name: a, label: {}}}",
            "f.yaml, document 1, Node a, metadata.label: unknown field \"label\": write labels",
        ),
    ] {
        assert_eq!(parsed(text), (vec![], vec![problem.to_owned()]), "{text}");
    }
}

#[test]
fn a_field_that_kubernetes_types_do_not_know_is_told_and_ignored() {
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {containers: [{name: c, imag: x}]}, status: {podIp: 10.0.0.1}}";
    assert_eq!(
        parsed(pod),
        (
            vec!["Pod default/a".to_owned()],
            vec![
                "f.yaml, document 1, Pod default/a, spec.containers[0].imag: unknown field \"imag\" is ignored: correct its \
                 spelling or remove it"
                    .to_owned(),
                "f.yaml, document 1, Pod default/a, status.podIp: unknown field \"podIp\" is ignored: correct its spelling \
                 or remove it"
                    .to_owned(),
            ]
        )
    );
}

#[test]
fn lists_as_kubectl_writes_them() {
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": "v1", "kind": "Node", "metadata": { "name": "a", "resourceVersion": "7", "managedFields": [] } },
        { "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "b" } },
    ]});
    assert_eq!(parsed(list.to_string()), (vec!["Node a".to_owned(), "Namespace b".to_owned()], vec![]));
}

#[test]
fn names_are_safe_as_file_names() {
    for name in ["a", "a-b.c9", "2001-0db8", "192.0.2.1"] {
        assert!(is_name(name), "{name}");
    }
    for name in ["", ".", "..", "a/b", "../a", "A", "a_b", "-a", "a-", "a..b", ".a", "a.", "ä", &"a".repeat(254)] {
        assert!(!is_name(name), "{name}");
    }
}

/// Generates pieces of YAML that together often parse.
fn fragments() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..12),
        prop::sample::select(vec![
            "---\n",
            "kind: Pod\n",
            "kind: EgressGatewayPolicy\n",
            "apiVersion: v1\n",
            "apiVersion: spillway.io/v1beta1\n",
            "metadata: {name: a}\n",
            "metadata:\n",
            "spec:\n",
            "  - a\n",
            "&a ",
            "*a ",
            "<<: *a\n",
            "{",
            "}",
            "[",
            "]",
            ": ",
            "!!binary x",
            "? ",
            "|\n",
            ">-\n",
            "\t",
            "\"",
            "'",
            "kind: List\nitems:\n",
            "status: {podIP: 3}\n",
            "1e999",
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(text in fragments()) {
        parsed(text);
    }

    #[test]
    fn any_string_survives_the_files_that_spillway_writes(text in ".*", key in "[ -~]{1,12}") {
        let value = json!({ "a": text, key: [text, { "b": text }] });
        let yaml = serde_saphyr::to_string(&value).unwrap();
        prop_assert_eq!(serde_saphyr::from_str::<serde_json::Value>(&yaml).unwrap(), value);
    }

    /// Whatever users write and whenever, the version in force is always a complete written version.
    #[test]
    fn only_whole_versions_are_ever_in_force(
        steps in prop::collection::vec((0..3usize, 0..4usize, 0..500u64), 1..40)
    ) {
        let mut world = DirectoryFixture::new();
        for (number, (file, action, pause)) in steps.into_iter().enumerate() {
            let path = ["a.yaml", "b.yaml", "c.yaml"][file];
            let whole = format!("{}\n---\n{}", node(&format!("x{file}"), &number.to_string()), node(&format!("y{file}"), &number.to_string()));
            match action {
                0 => world.write(path, whole),
                1 => world.write(path, "{ broken"),
                2 => drop(world.files.remove(Path::new(path))),
                _ => {}
            }
            world.pass(Duration::from_millis(pause));
            for file in 0..3 {
                prop_assert_eq!(world.label(&format!("x{file}")), world.label(&format!("y{file}")));
            }
        }
        world.settle();
        for (file, path) in ["a.yaml", "b.yaml", "c.yaml"].into_iter().enumerate() {
            let on_disk = world.files.get(Path::new(path));
            let broken = on_disk.is_some_and(|(text, _)| text == b"{ broken");
            if !broken {
                prop_assert_eq!(world.label(&format!("x{file}")).is_some(), on_disk.is_some());
            }
        }
    }
}
