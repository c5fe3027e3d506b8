//! The two versions of the kinds that users write.

use super::*;

#[test]
fn short_forms_exist_only_in_the_previous_version() {
    for (short, list, value) in
        [("egressGateway", "egressGateways", "{nodeSelector: {}}"), ("egressIPPool", "egressIPPools", "{name: a}")]
    {
        let object = policy(&format!("{{{REST}, {short}: {value}}}"));
        accepted(alpha(object.clone()));
        refused(object, &[&format!("spec.{short}: v1beta1 has no {short}: write {list} with one entry")]);
    }
}

/// An API server converts one version to the other by changing only `apiVersion`: nothing is lost if both have the same fields.
#[test]
fn both_versions_have_the_same_fields() {
    for (file, crd) in crds().into_iter().filter(|(_, crd)| crd.spec.versions.len() > 1) {
        let [new, old] = &crd.spec.versions[..] else { panic!("{file}: other than two versions") };
        assert_eq!([&new.name, &old.name], ["v1beta1", "v1alpha1"]);
        assert!(new.served && new.storage && old.served && !old.storage, "{file}");
        let fields = |version: &CustomResourceDefinitionVersion| {
            let mut schema = serde_json::to_value(&version.schema).unwrap();
            let rules = &mut schema["openAPIV3Schema"]["properties"]["spec"]["x-kubernetes-validations"];
            let stays = |rule: &Value| !rule["rule"].as_str().unwrap().starts_with("!has(self.egress");
            rules.as_array_mut().unwrap().retain(stays);
            schema
        };
        assert_eq!(fields(new), fields(old), "{file}");
    }
}
