"""Every attack of tests/rig/hostile_attacks.c on a service of its own, and how much memory the host's processes take meanwhile."""
import pathlib

import hostile_rig
import pytest
from client import check_timeline
from hostile_rig import ATTACKS, CAP

AT_ONCE = 8


@pytest.fixture(scope="module")
def hostile(cluster, bin_dir, tmp_path_factory):
    made = hostile_rig.start(cluster, bin_dir, tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


def peak_kib(pid):
    """The most memory that a process has had, without what the sanitizer maps for itself."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0])


@pytest.mark.guest
@pytest.mark.parametrize("first", range(0, len(ATTACKS), AT_ONCE))
def test_all_attacks(hostile, first):
    hostile_rig.attack(hostile, list(ATTACKS)[first:first + AT_ONCE])


@pytest.mark.guest
def test_memory_of_channel_and_broker(hostile):
    """A guest that does nothing but send: both processes stay small, whatever comes."""
    client = hostile.client()
    for name in ("deaf", "endless-call", "console-flood"):
        run_id = client.create(prompt=f"{name} attack", timeout_seconds=6, max_cost_micros=CAP)["id"]
        client.event(run_id, "worker.started", 120)
        peak = {}
        while client.read(run_id)["status"] == "running":
            for role in ("channel", "broker"):
                for pid in hostile.node.role_pids(role):
                    try:
                        peak[role] = max(peak.get(role, 0), peak_kib(pid))
                    except (FileNotFoundError, ProcessLookupError, IndexError):
                        pass
        client.settled(run_id, 60)
        assert all(kib < 160 * 1024 for kib in peak.values()), (name, peak)
    hostile.node.clean()


@pytest.mark.guest
def test_wrong_nonce(hostile):
    """A machine that does not answer the probe has not started; the run is tried elsewhere and costs nothing."""
    client = hostile.client()
    run = client.run("anything", 250, timeout_seconds=20, max_cost_micros=CAP, size="standard")
    events = client.events(run["id"])
    check_timeline(run, events)
    assert run["status"] == "failed" and run["error"]["code"] == "vm_start_failed" and run["cost_micros"] == 0, run["error"]
    assert not [e for e in events if e["type"] == "worker.started"]
    hostile.node.clean()
    hostile.control.check_ledger()
