"""How a run gets its VM: a warm one, a clone of a golden one, or one that boots for it; and that none of it costs anybody a place."""
import datetime
import os
import re
import signal

import host
import pytest
import wait
from client import check_timeline, output_of, say, shell, turns


def logged(node, text):
    return [line for line in node.log.read_text(errors="replace").splitlines() if text in line]


def warm_ready(node):
    return len(logged(node, " warm and ready "))


def started(client, run_id):
    return client.event(run_id, "worker.started")["data"]


@pytest.mark.guest
def test_warm_vms(make_stack):
    """A run takes a warm VM, each is used once and replaced; a run without room for it ends one; those of another size are cold."""
    stack = make_stack(node={"warm_min": 1, "warm_max": 1, "max_vms": 2, "memory_mib": 3000, "vcpus": 4})
    node, client = stack.node, stack.client()
    wait.until(lambda: warm_ready(node) == 1, 90, "a warm VM")
    descriptors = len(os.listdir(f"/proc/{node.process.pid}/fd"))
    first = client.run(turns(shell("echo one > /tmp/mark; cat /tmp/mark"), say("done")))
    assert first["status"] == "succeeded", first["error"]
    events = client.events(first["id"])
    check_timeline(first, events)
    assert started(client, first["id"])["start_mode"] == "warm"

    wait.until(lambda: warm_ready(node) == 2, 90, "the warm VM that replaces it")
    second = client.run(turns(shell("ls /tmp/mark"), say("done")))
    assert started(client, second["id"])["start_mode"] == "warm"
    assert "No such file" in str(client.events(second["id"])), "the second run has the first one's machine"

    # Both places are needed by runs of another size: the warm VM gives its own up, and comes back when there is room again.
    wait.until(lambda: warm_ready(node) == 3, 90, "a warm VM again")
    made = [client.create(prompt=turns(shell("sleep 3"), say("done")), size="small")["id"] for _ in range(2)]
    for run in made:
        settled = client.settled(run)
        assert settled["status"] == "succeeded", settled["error"]
        assert started(client, run)["start_mode"] != "warm"
        assert settled.get("attempts", 1) == 1
    assert logged(node, "a run needs its room")
    wait.until(lambda: warm_ready(node) >= 4, 90, "a warm VM after the crowd")

    # A warm VM that dies is nobody's loss.
    def idle():
        return node.role_pids("vmm") if len(node.role_pids("vmm")) == 1 else None
    before = warm_ready(node)
    os.kill(wait.until(idle, 30, "one VMM")[0], signal.SIGKILL)
    wait.until(lambda: warm_ready(node) > before, 90, "the warm VM after the killed one")
    third = client.run(turns(say("done")))
    assert third["status"] == "succeeded" and started(client, third["id"])["start_mode"] == "warm"

    # Once more one warm VM and nothing else: none of those before it kept a descriptor of noded's. (A snapshot has a few.)
    wait.until(lambda: warm_ready(node) > before + 1 and len(node.role_pids("vmm")) == 1, 90, "the last warm VM")
    wait.until(lambda: len(os.listdir(f"/proc/{node.process.pid}/fd")) <= descriptors + 4, 30, "descriptors of VMs that are gone")
    node.stop()
    assert host.leftovers(node) == []


CLONES = 8
LOOK = ("head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n'; echo; python3 -c 'import uuid; print(uuid.uuid4())'; "
        "cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id; date +%s.%N")


@pytest.mark.guest
def test_clones_share_nothing(make_stack):
    """Clones of one snapshot: nothing random is the same, no boot id, and their clocks are right."""
    stack = make_stack(node={"start_mode": "auto", "max_vms": 3, "max_concurrent_boots": 2, "memory_mib": 4000})
    node, client = stack.node, stack.client()
    wait.until(lambda: logged(node, "golden snapshot ready"), 120, "a golden snapshot")
    seen, boot_ids = [], set()
    for first in range(0, CLONES, 2):
        made = [client.create(prompt=turns(shell(LOOK), say("done")))["id"] for _ in range(min(2, CLONES - first))]
        for run in made:
            settled = client.settled(run)
            assert settled["status"] == "succeeded", settled["error"]
            event = client.event(run, "worker.started")
            assert event["data"]["start_mode"] == "clone"
            boot_ids.add(event["data"]["boot_id"])
            events = client.events(run)
            check_timeline(settled, events)
            lines = [line for line in output_of(events).splitlines() if re.fullmatch(r"[0-9a-f.-]+", line)]
            assert len(lines) >= 5, lines
            seen += lines[:4]
            # The guest's clock against ours: the output was read between both times of the timeline.
            began = datetime.datetime.fromisoformat(settled["created_at"].replace("Z", "+00:00")).timestamp()
            at = {e["type"]: e["t"] for e in events}
            assert began + at["worker.started"] - 0.5 <= float(lines[4]) <= began + at["microvm.destroyed"] + 0.5
    assert len(set(seen)) == 4 * CLONES, "two clones have drawn the same"
    assert len(boot_ids) == CLONES


@pytest.mark.guest
def test_a_clone_that_fails(make_stack):
    """A clone that does not come up takes its snapshot with it; what comes meanwhile boots, and another snapshot is made."""
    stack = make_stack(node={"start_mode": "auto", "max_vms": 4, "warm_min": 1, "warm_max": 1})
    node, client = stack.node, stack.client()
    wait.until(lambda: warm_ready(node) == 1, 120, "a warm VM, from the snapshot")
    assert len(logged(node, "golden snapshot ready")) == 1

    def newest(known):
        return [pid for pid in node.role_pids("vmm") if pid not in known]

    for _ in range(5):
        known = node.role_pids("vmm")
        os.kill(known[0], signal.SIGKILL)  # the one that is up: it is replaced by a clone, which is killed before it is up
        victim = wait.until(lambda: newest(known), 60, "the next warm VM", every=0.002)[0]
        os.kill(victim, signal.SIGKILL)
        before = warm_ready(node)
        wait.until(lambda: logged(node, "golden snapshot dropped") or warm_ready(node) > before, 60, "what became of it")
        if logged(node, "golden snapshot dropped"):
            break
    assert logged(node, "clone did not come up") and logged(node, "golden snapshot dropped")
    run = client.run(turns(say("done")))
    assert run["status"] == "succeeded", run["error"]
    wait.until(lambda: len(logged(node, "golden snapshot ready")) == 2, 120, "another snapshot")
    node.stop()
    assert host.leftovers(node) == []


@pytest.mark.guest
def test_warm_vms_outlive_noded(make_stack):
    """A warm VM that noded's next start took over serves a run like another."""
    stack = make_stack(node={"warm_min": 1, "warm_max": 1, "max_vms": 3})
    node, client = stack.node, stack.client()
    wait.until(lambda: warm_ready(node) == 1, 90, "a warm VM")
    vmm = node.role_pids("vmm")
    node.restart()
    wait.until(lambda: warm_ready(node) == 2, 60, "the warm VM, taken over")
    assert node.role_pids("vmm") == vmm
    run = client.run(turns(say("done")))
    assert run["status"] == "succeeded", run["error"]
    assert started(client, run["id"])["start_mode"] == "warm"
    check_timeline(run, client.events(run["id"]))
    # Of a warm VM that was taken over all goes as of any other; what replaces it is ended with noded.
    wait.until(lambda: any("forgotten" in line for line in logged(node, f"run={run['id']} vm=")), 60, "its end")
    node.stop()
    assert host.leftovers(node) == []
