"""How long a run waits for its worker: from the POST sent to `worker.started` read by the client, from warm VMs one after another and
all at once; and cold boots and clones beside the same VMM alone."""
import http.client
import json
import os
import pathlib
import shutil
import socket
import statistics
import tempfile
import threading
import time
import urllib.parse

import control as control_rig
import guest_host
import node as node_rig
import pg
import wait
from client import say, shell, turns

WARM, BURST, POOL, PAIRS = int(os.environ.get("EPHEMERAL_BENCH_STARTS", 200)), 20, 20, 15
P50_MS, P99_MS, BURST_MS = 50, 150, 1000
COLD_TARGET, CLONE_MS = 1.10, 80


def start_once(control, client, prompt):
    """POST, then the stream of its events up to worker.started; (milliseconds, run id, start mode)."""
    where = urllib.parse.urlparse(client.url)
    head = {"Authorization": f"Bearer {client.key}"}
    post, stream = (http.client.HTTPConnection(where.hostname, where.port, timeout=60) for _ in range(2))
    post.connect()
    stream.connect()
    for one in (post, stream):
        one.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = json.dumps({"shell": True, "timeout_seconds": 120, "max_cost_micros": 1_000_000, "prompt": prompt, "size": "small"})
    began = time.monotonic()
    post.request("POST", "/v1/runs", body, {**head, "Content-Type": "application/json"})
    answer = post.getresponse()
    run = json.loads(answer.read())
    assert answer.status == 201, run
    stream.request("GET", f"/v1/runs/{run['id']}/events", headers={**head, "Accept": "text/event-stream"})
    answer = stream.getresponse()
    kind = None
    while True:
        line = answer.readline()
        assert line, "the stream ended before worker.started"
        if line.startswith(b"event: "):
            kind = line[7:].strip()
        elif line.startswith(b"data: ") and kind == b"worker.started":
            took = (time.monotonic() - began) * 1000
            post.close()
            stream.close()
            return took, run["id"], json.loads(line[6:])["data"]["start_mode"]


def percentile(values, part):
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def ready_warm(node):
    text = node.log.read_text(errors="replace")
    return text.count(" warm and ready ") - text.count(" takes a warm vm ") - text.count(" warm, put away ")


def warm_starts(control, node, client, progress):
    def pool(count):
        wait.until(lambda: ready_warm(node) >= count, 300, f"{count} warm VMs", every=0.05)

    took, modes = [], []
    for number in range(WARM):
        pool(POOL)
        ms, run_id, mode = start_once(control, client, turns(say("done")))
        assert client.settled(run_id)["status"] == "succeeded"
        took.append(ms)
        modes.append(mode)
        if number % 20 == 19:
            progress(f"  warm {number + 1}/{WARM}: p50 {statistics.median(took):.0f} ms, p99 {percentile(took, 0.99):.0f} ms")
    pool(POOL)
    burst = []
    gate = threading.Barrier(BURST)

    def one():
        gate.wait()
        burst.append(start_once(control, client, turns(say("done"))))
    threads = [threading.Thread(target=one) for _ in range(BURST)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(burst) == BURST and all(client.settled(run_id)["status"] == "succeeded" for _, run_id, _ in burst)
    modes += [mode for _, _, mode in burst]
    assert set(modes) == {"warm"}, {mode: modes.count(mode) for mode in modes}
    return took, [ms for ms, _, _ in burst]


def bench_warm(bin_dir, image, progress):
    with pg.Cluster(fsync=True) as cluster:
        control = control_rig.Control(cluster, bin_dir)
        node = node_rig.Node(control, bin_dir, image, max_vms=2 * POOL + 8, warm_min=POOL, warm_max=POOL, warm_memory_mib=256, start_mode="auto",
                             memory_mib=40000, vcpus=100, max_concurrent_boots=2, log_level="info").start()
        try:
            took, burst = warm_starts(control, node, control.new_client(), progress)
        finally:
            node.stop()
            node.close()
            control.close()
    for name, value, limit in (("warm, POST to worker.started, p50", statistics.median(took), P50_MS),
                               ("warm, POST to worker.started, p99", percentile(took, 0.99), P99_MS),
                               (f"warm, {BURST} at once, the last one", max(burst), BURST_MS)):
        yield {"name": name, "value": round(value, 1), "unit": "ms", "limit": limit, "ok": value <= limit}


# --- beside the bare VMM --------------------------------------------------------------------------------------------------------

def vmm_command(node):
    """The command line of a VMM that runs now, as its jail sees it."""
    pid = wait.until(lambda: node.role_pids("vmm"), 60, "a VMM")[0]
    return [part.decode() for part in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]


def outside(command, image, qmp=None, ram=None, share="off"):
    """The same outside the jail: our descriptor for the guest's port, a path for QMP or none, image and memory where they lie here."""
    def argv(_image, _memory, fd):
        out = list(command)
        for i, part in enumerate(out):
            if part.startswith("socket,id=guest,"):
                out[i] = f"socket,id=guest,fd={fd}"
            elif part.startswith("socket,id=qmp,"):
                out[i] = f"socket,id=qmp,path={qmp},server=on,wait=off" if qmp else "null,id=qmp"
            elif part.startswith("id=root,file="):
                out[i] = f"id=root,file={image}/rootfs.sqfs,format=raw,if=none,readonly=on,file.locking=off"
            elif part.startswith("memory-backend-file,"):
                out[i] = f"{part.split(',mem-path=')[0]},mem-path={ram},share={share}"
            elif part.startswith("on,obsolete=deny"):
                out[i] = "on,obsolete=deny"  # the state is written and read by a program: no descriptor of ours is at hand
        if share == "on":
            at = out.index("-incoming")
            del out[at:at + 2]
        out[out.index("-kernel") + 1] = f"{image}/vmlinux"
        out[out.index("-initrd") + 1] = f"{image}/initramfs.cpio"
        return out
    return argv


class Monitor:
    def __init__(self, path):
        self.sock = socket.socket(socket.AF_UNIX)
        wait.until(lambda: self.sock.connect_ex(path) == 0, 20, "the monitor", every=0.002)
        self.file = self.sock.makefile("rw")
        self.file.readline()
        self.ask("qmp_capabilities")
        self.ask("migrate-set-capabilities", capabilities=[{"capability": name, "state": True} for name in ("x-ignore-shared", "events")])

    def ask(self, command, **arguments):
        self.file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.file.flush()
        while True:
            said = json.loads(self.file.readline())
            if "error" in said:
                raise AssertionError(f"{command}: {said}")
            if "return" in said:
                return

    def moved(self):
        while json.loads(self.file.readline()).get("data", {}).get("status") != "completed":
            pass


def bare_snapshot(command, image, folder):
    guest_host.qemu_argv = outside(command, image, f"{folder}/golden", f"{folder}/ram", "on")
    with guest_host.Guest(image):
        monitor = Monitor(f"{folder}/golden")
        wait.fault_lasts(8)  # it has booted by then and waits for the probe
        monitor.ask("stop")
        monitor.ask("migrate", uri=f"exec:cat > {folder}/state")
        monitor.moved()


def bare_restore(command, image, folder):
    qmp = f"{folder}/clone"
    pathlib.Path(qmp).unlink(missing_ok=True)
    guest_host.qemu_argv = outside(command, image, qmp, f"{folder}/ram")
    with guest_host.Guest(image) as guest:
        monitor = Monitor(qmp)
        monitor.ask("migrate-incoming", uri=f"exec:cat {folder}/state")
        monitor.moved()
        monitor.ask("cont")
        guest.probe()
        return time.monotonic() - guest.started


def bare_boot(command, image):
    guest_host.qemu_argv = outside(command, image)
    with guest_host.Guest(image) as guest:
        guest.probe()
        return time.monotonic() - guest.started


def pairs(bin_dir, image, mode, alone_once, progress, prepare=lambda command: None):
    """PAIRS times our own start and the VMM alone, by turns; the medians in seconds."""
    with pg.Cluster(fsync=True) as cluster:
        control = control_rig.Control(cluster, bin_dir)
        node = node_rig.Node(control, bin_dir, image, max_vms=4, start_mode="auto" if mode == "clone" else "cold", warm_memory_mib=256, log_level="info").start()
        try:
            client = control.new_client()
            if mode == "clone":
                wait.until(lambda: "golden snapshot ready" in node.log.read_text(errors="replace"), 120, "a golden snapshot")
            first = client.create(prompt=turns(shell("sleep 2"), say("done")), size="small")
            command = vmm_command(node)
            client.settled(first["id"])
            prepare(command)
            ours, alone = [], []
            for number in range(PAIRS):
                ms, run_id, was = start_once(control, client, turns(say("done")))
                assert was == mode, was
                client.settled(run_id)
                node.clean()
                ours.append(ms / 1000)
                alone.append(alone_once(command))
                progress(f"  {mode} {number + 1}/{PAIRS}: {ours[-1]:.2f} s, bare {alone[-1]:.2f} s")
        finally:
            node.stop()
            node.close()
            control.close()
    return statistics.median(ours), statistics.median(alone)


def bench(bin_dir, image, progress):
    yield from bench_warm(bin_dir, image, progress)
    cold, boot = pairs(bin_dir, image, "cold", lambda command: bare_boot(command, image), progress)
    yield {"name": "cold, POST to worker.started, p50", "value": round(cold, 3), "unit": "s", "reference": round(boot, 3), "ratio": round(cold / boot, 3),
           "target": COLD_TARGET, "ok": cold / boot <= COLD_TARGET}
    folder = tempfile.mkdtemp(prefix="eph-bench-", dir="/dev/shm")
    try:
        clone, restore = pairs(bin_dir, image, "clone", lambda command: bare_restore(command, image, folder), progress,
                               lambda command: bare_snapshot(command, image, folder))
    finally:
        shutil.rmtree(folder)
    yield {"name": "clone, POST to worker.started, p50", "value": round(clone * 1000, 1), "unit": "ms", "reference": round(restore * 1000, 1),
           "ratio": round(clone / restore, 3), "limit": round(restore * 1000 + CLONE_MS, 1), "ok": clone * 1000 <= restore * 1000 + CLONE_MS}
