//! Tests of pools that are deleted or shrunk while their addresses are in use.

use super::*;
use egress_objects::snapshot::draining_since;

/// Returns the draining addresses, sorted, once there are `count`.
fn draining(store: &Store, count: usize) -> Option<Vec<String>> {
    let ips = store.list::<EgressIP>();
    let draining = ips.iter().filter(|ip| draining_since(ip).is_some()).map(|ip| ip.spec.address.clone());
    Some(draining.collect::<Vec<_>>()).filter(|all| all.len() == count)
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_gone_addresses_that_leave_their_pool_while_they_are_in_use_drain() {
    let mut world = ControllerFixture::new();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let one = controller(world.path(), "one");
    world.until(|store| owned_by(store, &["gw1", "gw2"])).await;

    let pool = world.path().join("pool.yaml");
    fs::write(&pool, POOL.replace("start: 192.0.2.1", "start: 192.0.2.2")).unwrap();
    assert_eq!(world.until(|store| draining(store, 1)).await, ["192.0.2.1"]);
    let degraded = world.until(|store| condition(store, "Degraded").filter(|found| found.1 == "Draining")).await;
    assert!(degraded.2.starts_with("192.0.2.1 (no longer in the ranges of pool public): no new connections"));
    let told = |store: &Store| {
        let pool = store.get::<EgressIPPool>(&Key::cluster("public"))?.status.clone()?;
        let condition = pool.conditions.iter().find(|condition| condition.type_ == "Draining")?.message.clone();
        (pool.usage.used == 2).then_some(condition)
    };
    assert_eq!(
        world.until(told).await,
        "in use and taken out of ipRanges: 192.0.2.1: no new connections; released when the last one ends, after 3600 s \
         (drainTimeout) at the latest; restore the ranges of addresses that must stay, and raise their policies' count"
    );

    fs::remove_file(&pool).unwrap();
    let all = world.until(|store| draining(store, 3)).await;
    assert_eq!(all, ["192.0.2.1", "192.0.2.2", "192.0.2.3"]);
    assert!(owners(&world.store).iter().all(|(_, node, _)| node.is_some()), "gateways still carry them");
    world.until(|store| condition(store, "Ready").filter(|found| found.1 == "NoAddress")).await;

    fs::write(&pool, POOL).unwrap();
    // The policy requests two addresses, and serves with the first two that came back.
    assert_eq!(world.until(|store| draining(store, 1)).await, ["192.0.2.3"]);
    world.until(|store| condition(store, "Ready").filter(|found| found.0 == "True")).await;

    // Another controller takes over and ends the drain in time.
    one.task.abort();
    let _two = controller_with(world.path(), "two", |config| config.drain_timeout = Duration::from_millis(1));
    fs::remove_file(&pool).unwrap();
    world.until(|store| store.list::<EgressIP>().is_empty().then_some(())).await;
}
