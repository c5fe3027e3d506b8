//! Tests of objects of the previous API version in a directory.

use super::*;

#[tokio::test]
async fn an_object_of_the_version_before_with_a_short_form_gets_its_status() {
    let dir = directory();
    let list = "egressIPPools: [{name: public}]";
    let old = POLICY.replace("v1beta1", "v1alpha1").replace(list, "egressIPPool: {name: public}");
    fs::write(dir.path().join("web.yaml"), old).unwrap();
    let store = Files::open(dir.path()).unwrap();
    let read = policy(&store).unwrap();
    // The object as a controller makes it.
    let mut web = egress_objects::api::EgressGatewayPolicy::new("web", read.spec.clone());
    web.metadata = read.metadata.clone();
    web.status = Some(egress_objects::api::EgressGatewayPolicyStatus { selected_endpoints: 7, ..Default::default() });
    store.replace_status(&web).await.unwrap();
    let now = policy(&store).unwrap();
    assert_eq!((&now.status, &now.spec), (&web.status, &read.spec));
}
