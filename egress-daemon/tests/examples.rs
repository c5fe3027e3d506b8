//! Checks that the CRDs accept the examples that users copy.

use std::fs;
use std::path::Path;

use egress_daemon::store::{Files, StoreProblem};
use egress_objects::api::{Distribution, EgressGatewayPolicy, EgressIPPool, EgressPolicy};

#[test]
fn every_example_is_accepted_and_starts_with_a_comment() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/examples");
    let directory = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(&examples).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("# "), "{} does not open with a comment", path.display());
        fs::write(directory.path().join(path.file_name().unwrap()), text).unwrap();
    }
    let store = Files::open(directory.path()).unwrap();
    assert_eq!(store.problems(), Vec::<StoreProblem>::new());

    let policies = store.list::<EgressGatewayPolicy>();
    let shown = |distribution| policies.iter().any(|policy| policy.spec.distribution == distribution);
    assert!(shown(Distribution::PerFlow) && shown(Distribution::PerEndpoint));
    assert_eq!(store.list::<EgressPolicy>().len(), 1);
    let selectors = policies.iter().flat_map(|policy| &policy.spec.selectors);
    // In a shared cluster, pods of any namespace can have the same labels.
    assert!(selectors.into_iter().all(|selector| selector.namespace_selector.is_some()));
    let gateways = policies.iter().filter_map(|policy| policy.spec.egress_gateways.as_ref());
    assert!(gateways.flatten().any(|gateway| gateway.weight > 1));
    for policy in &policies {
        for pool in policy.spec.egress_ip_pools.iter().flatten().chain(&policy.spec.egress_ip_pool) {
            assert!(store.list::<EgressIPPool>().iter().any(|one| one.metadata.name.as_ref() == Some(&pool.name)));
        }
    }
}
