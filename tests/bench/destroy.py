"""How long it takes from the order to end a VM until nothing of it is left: process by pidfd, control groups by their directories."""
import calendar
import re
import statistics
import time

import control as control_rig
import guest_host
import node as node_rig
import pg
import wait
from client import say, shell, turns
from outside import Watched, group_folders

RUNS, BARE_EVERY = 50, 5
LIMIT_MS = 100
ORDERED = r"^(\S+) info noded/broker: run state run=%s from=\S+ to=destroy"


def seconds_of(stamp):
    """Of the wall clock, from a log's time."""
    whole, _, part = stamp.rstrip("Z").partition(".")
    return calendar.timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + int(part or 0) / 1000


def one(client, node, number):
    """A run that ends by itself, or is cancelled, by turns; milliseconds from the broker's order to nothing left."""
    cancel = number % 2 == 1
    run_id = client.create(prompt=turns(shell("echo here; sleep 100"), say("never said")) if cancel else turns(say("done")), size="small")["id"]
    pid = wait.until(lambda: node.role_pids("vmm"), 60, "a VMM", every=0.005)[0]
    watched = Watched(pid, wait.until(lambda: group_folders(node, "vmm"), 10, "its groups"))
    if cancel:
        client.event(run_id, "shell.output", 120)
        client.cancel(run_id)
    _, gone = watched.until_gone(120)
    run = client.settled(run_id)
    assert run["status"] == ("cancelled" if cancel else "succeeded"), run["error"]
    ordered = re.search(ORDERED % run_id, node.log.read_text(errors="replace"), re.M)
    assert ordered, "the broker's order is not in the log"
    node.clean()
    return (gone - seconds_of(ordered[1])) * 1000


def bare_ms(image):
    """The same for a VMM alone: SIGKILL until it is reaped."""
    with guest_host.Guest(image) as guest:
        guest.probe()
        began = time.monotonic()
        guest.process.kill()
        guest.process.wait()
        return (time.monotonic() - began) * 1000


def bench(bin_dir, image, say_progress):
    with pg.Cluster(fsync=True) as cluster:
        control = control_rig.Control(cluster, bin_dir)
        node = node_rig.Node(control, bin_dir, image, max_vms=2).start()
        try:
            client, took, bare = control.new_client(), [], []
            for number in range(RUNS):
                took.append(one(client, node, number))
                if number % BARE_EVERY == 0:
                    bare.append(bare_ms(image))
                say_progress(f"  {number + 1}/{RUNS}: gone after {took[-1]:.0f} ms, bare {bare[-1]:.0f} ms")
        finally:
            node.close()
            control.close()
    took.sort()
    reference = statistics.median(bare)
    for name, value in (("p50", statistics.median(took)), ("p99", took[min(len(took) - 1, int(0.99 * len(took)))])):
        yield {"name": f"destroy, ordered to gone, {name} of {RUNS}", "value": round(value, 1), "unit": "ms", "reference": round(reference, 1),
               "ratio": round(value / reference, 3), "limit": LIMIT_MS, "ok": value <= LIMIT_MS}
