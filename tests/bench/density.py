"""What a host's processes cost in memory (Pss) with 50 VMs of 256 MiB: noded's own, a broker and a channel for each VM, and the VMMs. A
VMM stands still from its worker's start on, so that neither the figures nor the time that the others take depend on what runs do. What is
emulated has its translated code in memory as well, some 20 MiB; with KVM there is none."""
import os
import signal
import statistics

import control as control_rig
import node as node_rig
import pg
import wait
from client import say, turns
from outside import pss_kib

VMS = int(os.environ.get("EPHEMERAL_BENCH_VMS", "50"))
PAIR_MIB, NODED_MIB, CLONE_MIB = 5, 20, 40
TRIES = 6


def mib(pids):
    return [kib / 1024 for kib in map(pss_kib, pids) if kib is not None]


def mode_of(client, run_id):
    """How this run's VM came to be: cold, clone, warm."""
    return next(e["data"].get("start_mode", "cold") for e in client.events(run_id) if e["type"] == "worker.started")


def until_cloned(client):
    """Runs one after the other until a VM is cloned, because the snapshot for its size is there; or gives up, where none is made."""
    for _ in range(TRIES):
        run_id = client.run(turns(say("done")), size="small", seconds=300)["id"]
        if mode_of(client, run_id) == "clone":
            return


def rows(node, mode):
    pairs = [sum(pair) for pair in zip(sorted(mib(node.role_pids("broker"))), sorted(mib(node.role_pids("channel"))))]
    noded = sum(mib([node.process.pid, *node.role_pids("link")]))
    vmms = mib(node.role_pids("vmm"))
    yield {"name": f"broker and channel of one of {len(pairs)} VMs, largest", "value": round(max(pairs), 2), "unit": "MiB", "limit": PAIR_MIB, "ok": max(pairs) <= PAIR_MIB}
    yield {"name": f"noded (keeper and link) with {len(vmms)} VMs", "value": round(noded, 2), "unit": "MiB", "limit": NODED_MIB, "ok": noded <= NODED_MIB}
    value = statistics.median(vmms)
    row = {"name": f"VMM of 256 MiB, {mode}, p50 of {len(vmms)}", "value": round(value, 2), "unit": "MiB", "ok": True}
    yield {**row, "limit": CLONE_MIB, "ok": value <= CLONE_MIB} if mode in ("clone", "warm") else row


def bench(bin_dir, image, say_progress):
    with pg.Cluster(fsync=False) as cluster:
        control = control_rig.Control(cluster, bin_dir, max_running_per_org=VMS + 10, max_queued_per_org=VMS + 10)
        node = node_rig.Node(control, bin_dir, image, max_vms=VMS, max_concurrent_boots=1, memory_mib=VMS * 800, vcpus=2 * VMS,
                             boot_timeout_ms=180_000, log_level="info", start_mode="auto", warm_min=0, warm_max=0).start()
        stopped = []
        try:
            client, ids = control.new_client(), []
            until_cloned(client)
            for number in range(VMS):
                ids.append(client.create(prompt=turns(say("late", delay_ms=60_000)), size="small", timeout_seconds=3000)["id"])
                client.event(ids[-1], "worker.started", 300)
                fresh = [pid for pid in node.role_pids("vmm") if pid not in stopped]
                for pid in fresh:
                    os.kill(pid, signal.SIGSTOP)
                stopped += fresh
                say_progress(f"  {number + 1}/{VMS} VMs work")
            yield from rows(node, "/".join(sorted({mode_of(client, run_id) for run_id in ids})))
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            stopped = []
            for run_id in ids:
                client.cancel(run_id)
            for run_id in ids:
                client.settled(run_id, 200)
            wait.until(lambda: not node.role_pids("vmm"), 120, "the end of every VM")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
            node.close()
            control.close()
