#!/bin/bash
# usage: node-init.sh DIR NODE ADDRESS BIN LABELS; process 1 of a node of the test cluster: mounts file systems, starts
# containerd, imports the image that every pod needs, and starts kubelet and kube-proxy. Killing it ends the node.
set -e
D=$1 N=$2 A=$3 B=$4 L=$5 W=$D/$N
export PATH=$B:$PATH
hostname "$N"
mount -t proc proc /proc
# The kubelet requires these settings. Files with the required values hide the machine's settings, which stay as they are.
for v in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1; do
  f=$W/sysctl-$(basename "${v%=*}"); echo "${v#*=}" > "$f"; mount --bind "$f" "/proc/sys/${v%=*}"
done
cs=$(awk -F: '$2 != "" {print $2}' /proc/self/cgroup)
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /sys/fs/cgroup
for c in $cs; do d=/sys/fs/cgroup/${c#name=}; mkdir "$d"; mount -t cgroup -o "$c" cgroup "$d"; done
mount -t bpf bpf /sys/fs/bpf
mount -t tmpfs tmpfs /run; mount --bind "$W/lib" /var/lib; mount --bind "$W/log" /var/log
mkdir -p /var/lib/kubelet /var/lib/containerd /run/containerd
mount --make-rshared /
containerd -c "$W/containerd.toml" > "$W/containerd.log" 2>&1 &
for _ in $(seq 300); do ctr version > /dev/null 2>&1 && break; sleep .1; done
ctr -n k8s.io images import --local "$D/pod.tar" > "$W/import.log" 2>&1
k8s kubelet --config="$W/kubelet.yaml" --kubeconfig="$D/$N.kubeconfig" --hostname-override="$N" --node-ip="$A" \
  --node-labels="$L" > "$W/kubelet.log" 2>&1 &
# flannel ends as long as the node has no network for its pods.
[ -e "$D/flannel.json" ] && while sleep 1; do
  NODE_NAME=$N flannel --kube-subnet-mgr --kubeconfig-file="$D/kubeconfig" --net-config-path="$D/flannel.json" --iface=eth0 \
    --ip-masq >> "$W/flannel.log" 2>&1
done &
# Clusters cover both of kube-proxy's modes.
MODE=iptables
[ -e "$D/flannel.json" ] && MODE=nftables
# The settings of conntrack cannot be changed in this network namespace.
k8s proxy --kubeconfig="$D/proxy.kubeconfig" --hostname-override="$N" --proxy-mode=$MODE --conntrack-max-per-core=0 \
  --conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=0 --bind-address="$A" \
  --healthz-bind-address=127.0.0.1 --metrics-bind-address=127.0.0.1 > "$W/proxy.log" 2>&1 &
wait
