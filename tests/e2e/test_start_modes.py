"""How a run gets its VM: a warm one, a clone of a golden one, or one that boots for it; and that none of it costs anybody a place."""
import host
import pytest
import wait
from client import check_timeline, say, shell, turns


def warm_ready(node):
    return node.log.read_text(errors="replace").count(" warm and ready ")


def started(client, run_id):
    return client.event(run_id, "worker.started")["data"]


@pytest.mark.guest
def test_warm_vms(make_stack):
    """A run takes a warm VM, each is used once and replaced; a run without room for it ends one; those of another size are cold."""
    stack = make_stack(node={"warm_min": 1, "warm_max": 1, "max_vms": 2, "memory_mib": 3000, "vcpus": 4})
    node, client = stack.node, stack.client()
    wait.until(lambda: warm_ready(node) == 1, 90, "a warm VM")
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
    assert node.logged("a run needs its room")
    wait.until(lambda: warm_ready(node) >= 4, 90, "a warm VM after the crowd")

    # A warm VM that dies is nobody's loss.
    def idle():
        return node.role_pids("vmm") if len(node.role_pids("vmm")) == 1 else None
    import os
    import signal
    before = warm_ready(node)
    os.kill(wait.until(idle, 30, "one VMM")[0], signal.SIGKILL)
    wait.until(lambda: warm_ready(node) > before, 90, "the warm VM after the killed one")
    third = client.run(turns(say("done")))
    assert third["status"] == "succeeded" and started(client, third["id"])["start_mode"] == "warm"
    wait.until(lambda: node.stop() or True, 60, "the node's end")
    assert host.leftovers(node) == []
