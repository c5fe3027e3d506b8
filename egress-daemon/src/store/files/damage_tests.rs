//! Malformed manifests: every text yields objects and problems, never a panic.

use super::parse::Parser;
use crate::store::Kind;
use egress_objects::snapshot::{ApiObjects, snapshot};
use proptest::prelude::*;
use std::{path::Path, sync::Arc};

thread_local! {
    static PARSER: Parser = Parser::new().unwrap();
}

const EXAMPLES: [&str; 5] = [
    include_str!("../../../../manifests/examples/ledger-per-endpoint.yaml"),
    include_str!("../../../../manifests/examples/mail-weighted.yaml"),
    include_str!("../../../../manifests/examples/pools.yaml"),
    include_str!("../../../../manifests/examples/web-per-flow.yaml"),
    include_str!("../../../../manifests/examples/web-to-partner.yaml"),
];

/// Pieces of text with a meaning in YAML, in JSON, or in place of a number, an address or a name.
const PIECES: [&str; 28] = [
    "",
    " ",
    "\n",
    "\n---\n",
    ": ",
    "- ",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "'",
    "|\n",
    "&a",
    "*a",
    "!!binary ",
    "null",
    "true",
    "-1",
    "0",
    "18446744073709551616",
    "1e999",
    ".nan",
    "0.0.0.0/33",
    "::/129",
    "ffff::1.2.3.4",
    "\u{feff}",
    "\u{0}\u{7f}é",
];

/// Generates an example with some parts replaced.
fn damaged() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        3 => prop::sample::select(PIECES.to_vec()).prop_map(|piece| piece.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..6),
    ];
    let edits = prop::collection::vec((any::<prop::sample::Index>(), 0usize..12, piece), 1..6);
    (prop::sample::select(EXAMPLES.to_vec()), edits).prop_map(|(text, edits)| {
        let mut text = text.as_bytes().to_vec();
        for (at, len, piece) in edits {
            let at = at.index(text.len() + 1);
            let end = (at + len).min(text.len());
            text.splice(at..end, piece);
        }
        text
    })
}

/// Processes a text as agents and the controller do: parses objects, and derives the inputs of a plan.
fn digest(text: &[u8]) -> usize {
    let (parsed, _) = PARSER.with(|parser| parser.parse(Path::new("x.yaml"), text));
    let mut objects = ApiObjects::default();
    for one in &parsed {
        match one.target.kind {
            Kind::EgressGatewayPolicy => {
                objects.policies.extend(serde_json::from_value(one.object.value()).ok().map(Arc::new));
            }
            Kind::EgressIPPool => objects.pools.extend(serde_json::from_value(one.object.value()).ok().map(Arc::new)),
            _ => {}
        }
    }
    let (_, problems) = snapshot(&objects);
    problems.into_iter().for_each(|problem| drop(format!("{problem:?}")));
    parsed.len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn damaged_manifests_never_panic(text in damaged()) {
        digest(&text);
    }

    #[test]
    fn arbitrary_bytes_never_panic(text in prop::collection::vec(any::<u8>(), 0..300)) {
        digest(&text);
    }
}

#[test]
fn the_examples_themselves_are_read() {
    assert!(EXAMPLES.iter().all(|text| digest(text.as_bytes()) > 0));
}
