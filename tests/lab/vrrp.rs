//! The usual setup for gateway failover: two gateways with keepalived, and conntrackd, which replicates the conntrack
//! table. Both programs are Debian's, with the settings of conntrackd's own example for FTFW.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::topology::{Dual, Lab, LabNode, address};
use crate::wait::wait_for;

/// The underlay host number of the address to which the pods' nodes send all packets.
const INSIDE: u8 = 50;
const START: Duration = Duration::from_secs(20);
/// VRRP priorities: the first gateway is the primary.
const PRIORITIES: [u8; 2] = [150, 100];

/// Makes the lab's first two gateways such a pair, with `egress` as the source of pods' packets to the outside; the first one has it.
pub fn start(lab: &mut Lab, advert: Duration, egress: Dual) -> Result<()> {
    let pair: Vec<LabNode> = lab.gateways().take(PRIORITIES.len()).cloned().collect();
    let [first, second] = &pair[..] else { anyhow::bail!("the lab has no two gateways") };
    for (node, peer, priority) in [(first, second, PRIORITIES[0]), (second, first, PRIORITIES[1])] {
        let dir = lab.dir().join(format!("vrrp-{}", node.name));
        fs::create_dir_all(&dir)?;
        translate(node, egress)?;
        fs::write(dir.join("conntrackd.conf"), conntrackd(&dir, node, peer))?;
        let script = dir.join("primary-backup.sh");
        fs::write(&script, notify(&dir))?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
        fs::write(dir.join("keepalived.conf"), keepalived(&script, priority, advert, egress))?;
        let mut command = node.ns.command("conntrackd");
        command.arg("-C").arg(dir.join("conntrackd.conf"));
        lab.start_program(&format!("conntrackd-{}", node.name), Some(&node.name), command)?;
        wait_for("conntrackd listens", START, || Ok(dir.join("ctl").exists()))?;
        let mut command = node.ns.command("keepalived");
        command.args(["--vrrp", "--dont-fork", "--log-console", "--use-file"]).arg(dir.join("keepalived.conf"));
        command.arg("--pid").arg(dir.join("keepalived.pid")).arg("--vrrp_pid").arg(dir.join("vrrp.pid"));
        lab.start_program(&format!("keepalived-{}", node.name), Some(&node.name), command)?;
        if priority == PRIORITIES[0] {
            let has = || Ok(node.ns.sh("ip addr show dev ext0")?.contains(&format!("{}/", egress.v4)));
            wait_for("the primary has the address", START, has)?;
        }
    }
    let inside = address::underlay(INSIDE);
    let lines =
        [inside.v4.to_string(), inside.v6.to_string()].map(|via| format!("route replace default via {via} dev eth0"));
    lab.workers().try_for_each(|worker| worker.ns.ip(&lines))
}

/// Sets up source NAT by the kernel's conntrack, with the rules of a stateful firewall: packets that arrive before the
/// primary's connections are in the table are dropped, not answered with a reset.
fn translate(node: &LabNode, egress: Dual) -> Result<()> {
    let [pods4, pods6] = address::PODS;
    node.ns.nft(&format!(
        "table inet vrrp {{
            chain postrouting {{
                type nat hook postrouting priority srcnat;
                oifname \"ext0\" ip saddr {pods4} snat ip to {}
                oifname \"ext0\" ip6 saddr {pods6} snat ip6 to {}
            }}
            chain input {{
                type filter hook input priority filter;
                ip daddr {} ct state {{ new, invalid }} drop
                ip6 daddr {} ct state {{ new, invalid }} drop
            }}
            chain forward {{
                type filter hook forward priority filter;
                ct state invalid drop
            }}
        }}",
        egress.v4, egress.v6, egress.v4, egress.v6
    ))?;
    // conntrackd does not replicate the windows of connections.
    let settings = [("net.netfilter.nf_conntrack_tcp_be_liberal", "1"), ("net.netfilter.nf_conntrack_tcp_loose", "0")];
    node.ns.sysctls(&settings)
}

fn keepalived(script: &Path, priority: u8, advert: Duration, egress: Dual) -> String {
    let (script, inside) = (script.display(), address::underlay(INSIDE));
    format!(
        "global_defs {{
  script_user root
  enable_script_security
}}
vrrp_instance egress {{
  state BACKUP
  version 3
  interface eth0
  virtual_router_id 51
  priority {priority}
  advert_int {}
  track_interface {{
    ext0
  }}
  virtual_ipaddress {{
    {}/24 dev eth0
    {}/24 dev ext0
  }}
  virtual_ipaddress_excluded {{
    {}/64 dev eth0
    {}/64 dev ext0
  }}
  notify_master \"{script} primary\"
  notify_backup \"{script} backup\"
  notify_fault \"{script} fault\"
}}
",
        advert.as_secs_f64(),
        inside.v4,
        egress.v4,
        inside.v6,
        egress.v6
    )
}

fn conntrackd(dir: &Path, node: &LabNode, peer: &LabNode) -> String {
    let dir = dir.display();
    format!(
        "Sync {{
  Mode FTFW {{
    ResendQueueSize 131072
    PurgeTimeout 60
    ACKWindowSize 300
  }}
  UDP {{
    IPv4_address {}
    IPv4_Destination_Address {}
    Port 3780
    Interface eth0
    SndSocketBuffer 1249280
    RcvSocketBuffer 1249280
    Checksum on
  }}
  Options {{
    TCPWindowTracking Off
  }}
}}
General {{
  HashSize 32768
  HashLimit 131072
  LogFile {dir}/conntrackd.log
  Syslog off
  LockFile {dir}/lock
  UNIX {{
    Path {dir}/ctl
  }}
  NetlinkBufferSize 2097152
  NetlinkBufferSizeMaxGrowth 8388608
  Filter From Userspace {{
    Protocol Accept {{
      TCP
      UDP
      IPv6-ICMP
      ICMP
    }}
    Address Ignore {{
      IPv4_address 127.0.0.1
      IPv6_address ::1
    }}
  }}
}}
",
        node.underlay.v4, peer.underlay.v4
    )
}

/// Returns a script that acts like conntrackd's `primary-backup.sh`.
fn notify(dir: &Path) -> String {
    let call = format!("conntrackd -C {}/conntrackd.conf", dir.display());
    format!(
        "#!/bin/sh
case \"$1\" in
primary) {call} -c; {call} -f; {call} -R; {call} -B ;;
backup) {call} -t; {call} -n ;;
fault) {call} -t ;;
esac
"
    )
}
