//! The page of `egressctl serve`, as a browser shows it. `cargo xtask test --page` runs this.

use std::path::Path;

use anyhow::{Context, ensure};
use lab::browser::Browser;
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Family, Lab, PodSpec, wait_until};
use serde_json::Value;

use crate::support::{PATIENCE, start, wait_in_force, web};

const PAGE: &str = "http://127.0.0.1:8475/";
/// The texts of the graph, and the text about drops.
const SHOWN: &str = "return [...document.querySelectorAll('svg text, #drops div, #sum')].map(one => one.textContent)";
/// Clicks on the first line that leads to an egress IP, and reads the text that explains it.
const CLICK: &str = "document.querySelector('path.link:not(.plain)').dispatchEvent(new Event('click'))";
const DETAIL: &str = "return document.getElementById('detail').textContent";

#[test]
fn page_shows_current_flows_and_a_click_explains_one() {
    lab::require_root!();
    let picture = std::env::var_os("SPILLWAY_PAGE");
    lab::require!(picture.is_some(), "it needs a browser: cargo xtask test --page");
    Lab::builder().workers(1).servers(3).run(|lab| {
        lab.manifests().write("web", &web(&[10, 11, 12]))?;
        let web_pod = |name: &str| PodSpec::new(name, "worker1").label("app", "web");
        let mut pods = Vec::new();
        for name in ["cart-0", "cart-1", "mail-0", "web-0", "first"] {
            pods.push(lab.add_pod(web_pod(name))?);
        }
        let first = pods.pop().context("no pod")?;
        start(lab)?;
        let servers = ["server1", "server2", "server3"].map(|name| lab.server(name).clone());
        wait_in_force(&first, &servers[0], &[10, 11, 12])?;
        // The pod's flows disappear with it.
        lab.remove_pod("default/first")?;
        let (mut serving, mut running) = (Vec::new(), Vec::new());
        for (port, server) in [443, 5432, 8883].into_iter().zip(&servers) {
            serving.push(TcpServer::start(&server.ns, &server.ips.both(port), ServerMode::Stream)?);
        }
        for (number, pod) in pods.iter().enumerate() {
            for (nth, (port, server)) in [443, 5432, 8883].into_iter().zip(&servers).enumerate() {
                let count = 2 + 3 * ((number + nth) % 3);
                running.push(TcpClients::establish(
                    &pod.ns,
                    server.ips.at(Family::V4, port),
                    count,
                    TcpOptions::default(),
                )?);
            }
        }
        let _page = lab.start_egressctl("worker1", &["serve"])?;
        let browser = Browser::start(lab, &lab.node("worker1").ns, (1200, 860))?;
        let texts = || {
            browser.open(PAGE)?;
            let texts = wait_until(
                "the page shows a node",
                PATIENCE,
                || browser.run("return document.body.dataset.ready"),
                Value::is_string,
            );
            texts.and_then(|_| browser.run(SHOWN))
        };
        let has = |texts: &Value, wanted: &str| texts.as_array().into_iter().flatten().any(|text| text == wanted);
        let all = ["default/cart-0", "default/web-0", "192.0.2.10", "192.0.2.12", "gw1", "gw2"].map(str::to_owned);
        let remote = format!("{}/tcp", servers[1].ips.at(Family::V4, 5432));
        let wanted: Vec<String> = all.into_iter().chain([remote]).collect();
        let gone = first.ips.both(0).map(|address| address.ip().to_string());
        let complete =
            |texts: &Value| wanted.iter().all(|wanted| has(texts, wanted)) && !gone.iter().any(|gone| has(texts, gone));
        let texts = wait_until("the graph is complete", PATIENCE, texts, complete)?;
        ensure!(texts.to_string().contains("1 node: "), "{texts}");

        browser.run(CLICK)?;
        let said = wait_until(
            "the click is explained",
            PATIENCE,
            || browser.run(DETAIL),
            |said| said.as_str().is_some_and(|said| said.contains("worker1 to ") && !said.contains("asking node")),
        )?;
        ensure!(said.as_str().is_some_and(|said| said.contains("192.0.2.1")), "{said}");
        picture.iter().try_for_each(|file| browser.screenshot(Path::new(file)))
    });
}
