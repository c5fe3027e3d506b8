//! Accounts, under which the traffic of a policy, a namespace and an egress IP is counted. The number of accounts is bounded, and with it
//! the number of time series of a node. Traffic without an account is counted together, as [`OTHER`].

use super::{Encoder, NodeView, Numbers, name_text, tables::Tables};
use crate::model::PolicyId;
use egress_common::{
    abi::{NameKey, name_kind},
    limits::MAX_ACCOUNTS,
    net,
    traffic::{AccountKey, OTHER, REFUSED},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

/// The traffic that is counted together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Account {
    /// The egress IP; none for refused flows. As the first field, it gives these accounts precedence if not all have a place.
    pub egress_ip: Option<IpAddr>,
    /// The policy.
    pub policy: PolicyId,
    /// The namespace of the pods.
    pub namespace: Arc<str>,
}

impl Account {
    /// Returns the account of a key, from the names in the tables; none if a name is missing.
    pub fn of_key(key: &AccountKey, tables: &Tables) -> Option<Self> {
        let name = |kind, id| tables.names.get(&NameKey { kind, id }).map(name_text);
        let namespace = name(name_kind::NAMESPACE, key.namespace)?.into();
        let policy = name(name_kind::POLICY, key.policy)?.parse().ok()?;
        let egress_ip = match key.egress {
            REFUSED => None,
            egress => Some(net::from_any(tables.egress_ips.get(&egress)?.addr)),
        };
        Some(Self { egress_ip, policy, namespace })
    }
}

/// Returns which account each number in the tables stands for.
pub fn accounts(tables: &Tables) -> BTreeMap<u32, Account> {
    let account = |(key, number): (_, &u32)| Some((*number, Account::of_key(key, tables)?));
    tables.accounts.iter().filter_map(account).collect()
}

/// Returns the namespaces of the pods that policies select.
pub(super) fn namespaces(view: &NodeView) -> BTreeSet<Arc<str>> {
    let selected = view.endpoints.iter().filter(|(_, endpoint)| !endpoint.class.is_empty());
    selected.map(|(id, _)| id.namespace.clone()).collect()
}

/// Returns the numbers of namespaces that are in the tables.
pub(super) fn recover(present: &Tables) -> Numbers<Arc<str>> {
    let names = present.names.iter().filter(|(key, _)| key.kind == name_kind::NAMESPACE);
    Numbers(names.map(|(key, name)| (name_text(name).into(), key.id)).collect())
}

/// Returns the accounts that the pods of a node need.
fn wanted(view: &NodeView) -> BTreeSet<Account> {
    let parties: BTreeSet<(&PolicyId, &Arc<str>)> = view
        .endpoints
        .iter()
        .flat_map(|(id, endpoint)| endpoint.class.iter().map(move |policy| (policy, &id.namespace)))
        .collect();
    let of = |(policy, namespace): (&PolicyId, &Arc<str>)| {
        let slots = view.policies.get(policy).map(|policy| policy.slots.as_slice());
        let addresses = slots.into_iter().flatten().map(|slot| Some(slot.address)).chain(slots.map(|_| None));
        let (policy, namespace) = (policy.clone(), namespace.clone());
        addresses.map(move |egress_ip| Account { egress_ip, policy: policy.clone(), namespace: namespace.clone() })
    };
    parties.into_iter().flat_map(of).collect()
}

/// Returns a number below [`MAX_ACCOUNTS`] for each account while there are any: the one that it has in the maps, or a free one.
fn numbers(wanted: BTreeSet<Account>, present: &Tables) -> BTreeMap<Account, u32> {
    let known: BTreeMap<Account, u32> =
        accounts(present).into_iter().map(|(number, account)| (account, number)).collect();
    let taken: BTreeSet<u32> = present.accounts.values().copied().collect();
    let mut free = (u32::from(OTHER) + 1..MAX_ACCOUNTS as u32).filter(|number| !taken.contains(number));
    let number = |account: Account| {
        let number = known.get(&account).copied().or_else(|| free.next())?;
        Some((account, number))
    };
    wanted.into_iter().filter_map(number).collect()
}

/// Returns how many of the accounts that the pods need have no number of their own.
pub fn without_number(view: &NodeView, tables: &Tables) -> usize {
    wanted(view).len().saturating_sub(tables.accounts.len())
}

impl Encoder {
    /// Fills in the accounts. Those that do not fit are counted as [`OTHER`].
    pub(super) fn accounts(&self, view: &NodeView, present: &Tables, tables: &mut Tables) {
        for (account, number) in numbers(wanted(view), present) {
            let egress = account.egress_ip.map_or(Some(REFUSED), |address| self.egress.0.get(&address).copied());
            let (namespace, policy) = (self.namespaces.0.get(&account.namespace), self.policies.0.get(&account.policy));
            let (Some(&namespace), Some(&policy), Some(egress)) = (namespace, policy, egress) else { continue };
            tables.accounts.insert(AccountKey { namespace, policy, egress }, number);
        }
    }
}

#[cfg(test)]
#[path = "accounts_tests.rs"]
mod tests;
