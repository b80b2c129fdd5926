"""noded is killed with -9 and started again, again and again, with at least six runs alive each time: its VMs outlive it, the next one adopts
them, and every run ends once."""
import os
import re
import signal
import time

import pytest
from crowd import Crowd, Kill, reconciled
from fleet import Fleet

KILLS, ALIVE, LOOK = int(os.environ.get("EPHEMERAL_KILLS", "50")), 6, 5


def lines(node, pattern):
    return re.findall(pattern, node.log.read_text(errors="replace"), re.M)


@pytest.mark.guest
@pytest.mark.timeout(5400)
def test_noded_is_killed_and_started(bin_dir, image, figures):
    config = {"max_vms": 10, "max_concurrent_boots": 2, "boot_timeout_ms": 180_000, "memory_mib": 10_000, "vcpus": 20, "reconcile_seconds": LOOK}
    with Fleet(bin_dir, image, hosts=1, controlds=1, node=config) as fleet:
        node, crowd = fleet.nodes[0], Crowd(fleet, fleet.client(), want=10)
        try:
            for _ in range(KILLS):
                alive = crowd.until_alive(ALIVE)
                node.stop(signal.SIGKILL)
                began = time.monotonic()
                node.start()
                crowd.kills.append(Kill("noded", alive, time.monotonic() - began))
            crowd.finish()
        finally:
            if crowd.kills and all(run_id in crowd.ended for kill in crowd.kills for run_id in kill.alive):
                figures(*crowd.rows(), f"{len(lines(node, ' adopted '))} VMs adopted")
        alive, good = crowd.survived(crowd.kills)
        assert good >= 0.95 * alive, f"{good} of {alive} runs that were alive at a kill succeeded: {crowd.ends()}"
        fleet.clean()
        finds = reconciled(node)
        assert not any(finds), f"reconcile found something: {finds}"
