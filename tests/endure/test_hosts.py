"""Three hosts, two controlds and one Postgres under load: each is killed with -9 at least five times, in an order that dice make. Every run
ends once, the books add up, and every host is clean."""
import os
import random
import signal
import time

import pytest
import wait
from crowd import Crowd, Kill, reconciled
from fleet import Fleet

TIMES, ALIVE = int(os.environ.get("EPHEMERAL_KILLS", "5")), 6
LEASE = {"lease_seconds": 30, "lease_renew_seconds": 2, "lease_grace_seconds": 2}
NODE = {"max_vms": 4, "max_concurrent_boots": 1, "boot_timeout_ms": 180_000, "memory_mib": 6_000, "reconcile_seconds": 5, "start_mode": "auto"}


class Blows:
    """What is killed, and how it comes back."""

    def __init__(self, fleet, crowd):
        self.fleet, self.crowd = fleet, crowd

    def host(self, number):
        node = self.fleet.nodes[number]
        alive = {run_id for run_id, where in self.fleet.where(self.crowd.alive()).items() if where is node}
        node.stop(signal.SIGKILL)
        self.crowd.create()
        began = time.monotonic()
        node.start()
        return alive, began

    def controld(self, number):
        """Clients speak to the other one from now on, so that runs are made while it is away."""
        alive, dead, other = self.crowd.alive(), self.fleet.controls[number], self.fleet.controls[1 - number]
        dead.stop(signal.SIGKILL)
        self.fleet.serve_from(other, self.crowd.client)
        self.crowd.create()
        began = time.monotonic()
        dead.start()
        dead.until_ready(60)
        return alive, began

    def postgres(self, _):
        alive = self.crowd.alive()
        self.fleet.cluster.stop_server(signal.SIGKILL)
        began = time.monotonic()
        self.fleet.cluster.start_server()
        for control in self.fleet.controls:
            control.until_ready(60)
        return alive, began

    def strike(self, kind, number):
        alive, began = getattr(self, kind)(number)
        wait.until(lambda: all(self.fleet.serving.node_live(node.name) for node in self.fleet.nodes), 60, "every host to be live")
        self.crowd.kills.append(Kill(kind if kind == "postgres" else f"{kind} {number + 1}", alive, time.monotonic() - began))


@pytest.mark.guest
@pytest.mark.timeout(5400)
def test_each_is_killed_under_load(bin_dir, image, figures):
    blows = [("host", 0), ("host", 1), ("host", 2), ("controld", 0), ("controld", 1), ("postgres", 0)] * TIMES
    random.Random(5).shuffle(blows)
    with Fleet(bin_dir, image, 3, 2, LEASE, NODE, fsync=True) as fleet:
        crowd = Crowd(fleet, fleet.client(), want=12)
        for kind, number in blows:
            crowd.until_alive(ALIVE)
            Blows(fleet, crowd).strike(kind, number)
        crowd.finish()
        figures(*crowd.rows())
        alive, good = crowd.survived(crowd.kills)
        assert good >= 0.95 * alive, f"{good} of {alive} runs that were alive at a kill succeeded: {crowd.ends()}"
        assert crowd.ends()["succeeded"] >= 0.95 * len(crowd.ended), crowd.ends()
        fleet.clean()
        for node in fleet.nodes:
            finds = reconciled(node)
            assert not any(finds), f"reconcile found something on {node.name}: {finds}"
