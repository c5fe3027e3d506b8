//! Test support: tests that run in their own network namespaces, and changes to the networks there.
#![allow(missing_docs, clippy::unwrap_used, reason = "only tests use it")]

use std::fs::File;
use std::future::Future;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use futures::TryStreamExt;
use ipnet::IpNet;
use nix::sched::{CloneFlags, setns, unshare};
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourState};
use rtnetlink::{Handle, LinkBridge, LinkUnspec, LinkVeth, RouteMessageBuilder};
use tokio::task::JoinHandle;

use egress_core::network::MacAddress;

/// Longer than anything that a test waits for; only reached when a test fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// Awaits an event that must happen.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("timed out after {PATIENCE:?}: {what}"))
}

/// Runs the test in a fresh network namespace, with its own thread and runtime. Without root the test is skipped, and this is reported.
pub fn in_netns<F, Fut>(test: &str, body: F)
where
    F: FnOnce() -> Fut + Send + 'static,
    Fut: Future<Output = ()>,
{
    if !nix::unistd::geteuid().is_root() {
        crate::testing::skip(test, "root to create network namespaces");
        return;
    }
    let outcome = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        block_on(async {
            Net::here().up("lo").await;
            body().await;
        });
    })
    .join();
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Another network namespace. It exists as long as this value.
pub struct NetNs(File);

impl NetNs {
    pub fn create() -> NetNs {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            File::open("/proc/thread-self/ns/net").unwrap()
        };
        let namespace = NetNs(std::thread::spawn(make).join().unwrap());
        namespace.run(|| async { Net::here().up("lo").await });
        namespace
    }

    /// Runs a future in the namespace to its end, on another thread, while the calling thread waits.
    pub fn run<F, Fut, T>(&self, body: F) -> T
    where
        F: FnOnce() -> Fut + Send,
        Fut: Future<Output = T>,
        T: Send,
    {
        std::thread::scope(|scope| {
            let work = || {
                setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
                block_on(body())
            };
            scope.spawn(work).join().unwrap()
        })
    }
}

/// Changes to the network of the calling thread's namespace.
pub struct Net {
    pub handle: Handle,
    connection: JoinHandle<()>,
}

impl Drop for Net {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Net {
    pub fn here() -> Net {
        let (connection, handle, _) = rtnetlink::new_connection().unwrap();
        Net { handle, connection: tokio::spawn(connection) }
    }

    pub async fn message(&self, name: &str) -> LinkMessage {
        let mut links = std::pin::pin!(self.handle.link().get().match_name(name).execute());
        links.try_next().await.unwrap().unwrap()
    }

    pub async fn index(&self, name: &str) -> u32 {
        self.message(name).await.header.index
    }

    pub async fn mac(&self, name: &str) -> MacAddress {
        super::decode::link(&self.message(name).await).unwrap().mac.unwrap()
    }

    pub async fn veth(&self, name: &str, peer: &str) {
        self.handle.link().add(LinkVeth::new(name, peer).build()).execute().await.unwrap();
    }

    /// Creates a veth whose other end is in the namespace, with both ends up.
    pub async fn veth_into(&self, name: &str, other: &NetNs, peer: &str) {
        self.veth(name, peer).await;
        self.move_to(peer, other).await;
        self.up(name).await;
        other.run(|| async { Net::here().up(peer).await });
    }

    pub async fn bridge(&self, name: &str) {
        self.handle.link().add(LinkBridge::new(name).build()).execute().await.unwrap();
    }

    async fn change(&self, message: LinkMessage) {
        self.handle.link().change(message).execute().await.unwrap();
    }

    pub async fn move_to(&self, name: &str, other: &NetNs) {
        self.change(LinkUnspec::new_with_name(name).setns_by_fd(other.0.as_raw_fd()).build()).await;
    }

    pub async fn enslave(&self, name: &str, master: &str) {
        let master = self.index(master).await;
        self.change(LinkUnspec::new_with_name(name).controller(master).build()).await;
    }

    pub async fn up(&self, name: &str) {
        self.change(LinkUnspec::new_with_name(name).up().build()).await;
    }

    pub async fn down(&self, name: &str) {
        self.change(LinkUnspec::new_with_name(name).down().build()).await;
    }

    pub async fn delete(&self, name: &str) {
        self.handle.link().del(self.index(name).await).execute().await.unwrap();
    }

    pub async fn address(&self, name: &str, net: &str) {
        let net: IpNet = net.parse().unwrap();
        self.handle.address().add(self.index(name).await, net.addr(), net.prefix_len()).execute().await.unwrap();
    }

    pub async fn remove_address(&self, name: &str, address: &str) {
        let address: IpAddr = address.parse().unwrap();
        let request =
            self.handle.address().get().set_link_index_filter(self.index(name).await).set_address_filter(address);
        let found = std::pin::pin!(request.execute()).try_next().await.unwrap().unwrap();
        self.handle.address().del(found).execute().await.unwrap();
    }

    pub async fn default_route(&self, gateway: &str, metric: u32) {
        let gateway: IpAddr = gateway.parse().unwrap();
        let unspecified: IpAddr = if gateway.is_ipv6() { "::".parse().unwrap() } else { "0.0.0.0".parse().unwrap() };
        let route = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(unspecified, 0)
            .unwrap()
            .gateway(gateway)
            .unwrap()
            .priority(metric)
            .build();
        self.handle.route().add(route).execute().await.unwrap();
    }

    /// Adds a neighbour entry that is in use.
    pub async fn neighbour(&self, name: &str, address: &str, mac: MacAddress) {
        let request = self.handle.neighbours().add(self.index(name).await, address.parse().unwrap());
        let request = request.link_layer_address(&mac.0).state(NeighbourState::Reachable);
        request.execute().await.unwrap();
    }

    pub async fn neighbour_mac(&self, address: &str) -> Option<MacAddress> {
        let address: IpAddr = address.parse().unwrap();
        let wanted = match address {
            IpAddr::V4(address) => NeighbourAddress::Inet(address),
            IpAddr::V6(address) => NeighbourAddress::Inet6(address),
        };
        let all: Vec<_> = self.handle.neighbours().get().execute().try_collect().await.unwrap();
        let found =
            all.iter().find(|entry| entry.attributes.contains(&NeighbourAttribute::Destination(wanted.clone())))?;
        found.attributes.iter().find_map(|attribute| match attribute {
            NeighbourAttribute::LinkLayerAddress(bytes) => bytes.as_slice().try_into().ok().map(MacAddress),
            _ => None,
        })
    }
}
