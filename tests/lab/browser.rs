//! A real Chromium in a namespace of the lab, driven by the WebDriver protocol.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::command::{ask, feed};
use crate::netns::NetNs;
use crate::process::Process;
use crate::topology::Lab;
use crate::wait::wait_for;

const DRIVER: &str = "chromedriver";
const LISTENS: &str = "127.0.0.1:9515";
const START: Duration = Duration::from_secs(30);

/// A browser with one window.
#[derive(Debug)]
pub struct Browser {
    ns: NetNs,
    session: String,
    _process: Process,
}

impl Browser {
    /// Starts the browser with a window of this size.
    pub fn start(lab: &Lab, ns: &NetNs, (width, height): (u32, u32)) -> Result<Browser> {
        let mut command = ns.command(DRIVER);
        command.arg(format!("--port={}", LISTENS.rsplit(':').next().unwrap_or_default()));
        let home = lab.dir().join("browser");
        fs::create_dir_all(&home)?;
        command.env("HOME", &home);
        let process = Process::start(DRIVER, None, command, &lab.dir().join("logs"))?;
        let mut browser = Browser { ns: ns.clone(), session: String::new(), _process: process };
        wait_for("chromedriver listens", START, || Ok(browser.request("GET", "/status", None).is_ok()))?;
        // As root, Chromium only starts without its sandbox.
        let arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"];
        let arguments: Vec<String> =
            arguments.into_iter().map(str::to_owned).chain([format!("--window-size={width},{height}")]).collect();
        let wanted = json!({"capabilities": {"alwaysMatch": {"goog:chromeOptions": {"args": arguments}}}});
        let session = browser.request("POST", "/session", Some(&wanted))?;
        browser.session = session["sessionId"].as_str().context("no session")?.to_owned();
        Ok(browser)
    }

    /// Opens a page.
    pub fn open(&self, url: &str) -> Result<()> {
        self.session_request("POST", "url", Some(&json!({"url": url}))).map(drop)
    }

    /// Runs a script in the page. Returns its result.
    pub fn run(&self, script: &str) -> Result<Value> {
        self.session_request("POST", "execute/sync", Some(&json!({"script": script, "args": []})))
    }

    /// Writes a screenshot of the window as PNG.
    pub fn screenshot(&self, file: &Path) -> Result<()> {
        let picture = self.session_request("GET", "screenshot", None)?;
        let text = picture.as_str().context("no picture")?;
        feed(Command::new("sh").args(["-c", "base64 -d > \"$0\""]).arg(file), text)
    }

    fn session_request(&self, method: &str, what: &str, body: Option<&Value>) -> Result<Value> {
        self.request(method, &format!("/session/{}/{what}", self.session), body)
    }

    fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let mut curl = self.ns.command("curl");
        curl.args(["-sS", "-X", method, "--max-time", "60", "-H", "Content-Type: application/json"]);
        if body.is_some() {
            curl.args(["--data-binary", "@-"]);
        }
        curl.arg(format!("http://{LISTENS}{path}"));
        let text = ask(&mut curl, &body.map(Value::to_string).unwrap_or_default())?;
        let answer: Value = serde_json::from_str(&text).with_context(|| format!("{method} {path}: {text}"))?;
        ensure!(answer["value"]["error"].is_null(), "{method} {path}: {}", answer["value"]);
        Ok(answer["value"].clone())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Deleting the session ends Chromium.
        self.request("DELETE", &format!("/session/{}", self.session), None).ok();
    }
}
