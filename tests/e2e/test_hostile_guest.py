"""A guest whose init is not our agent but a program that breaks the guest channel's protocol (tests/rig/hostile_guest.c), through the whole
service: each attack ends its run with the right reason, nothing that it invented is believed, and nothing is left on the host. Some of the
attacks; `tests/run hostile` runs all."""
import hostile_rig
import pytest
from client import check_timeline
from hostile_rig import CAP

# One of each way to be ended; frames that are wrong in themselves are in tests/unit/test_noded_channel.c.
SHORT = ("second-hello", "event-flood", "deaf", "many-calls", "huge-call", "forbidden-tools", "call-after-result", "panic", "console-flood")


@pytest.fixture(scope="module")
def hostile(cluster, bin_dir, tmp_path_factory):
    made = hostile_rig.start(cluster, bin_dir, tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


@pytest.mark.guest
def test_attacks(hostile):
    hostile_rig.attack(hostile, SHORT)


@pytest.mark.guest
def test_lies_are_shown_as_the_guests(hostile):
    """What the guest says of its own work is shown as its word; it changes no number of ours."""
    client = hostile.client()
    run = client.run("lies about everything", timeout_seconds=20, max_cost_micros=CAP, size="small")
    events = client.events(run["id"])
    assert run["status"] == "succeeded" and run["output"] == "nothing was done"
    assert run["usage"]["model_calls"] == 0 and run["usage"]["total_tokens"] == 0 and run["cost"]["model_micros"] == 0
    assert not [e for e in events if e["type"] == "model.call"] and [e["type"] for e in events].count("run.settled") == 1
    assert events[-1]["source"] == "control"
    tool = next(e for e in events if e["type"] == "tool.called")
    assert tool["source"] == "guest" and tool["data"]["tool"] == "model.call"


@pytest.mark.guest
def test_binary_result(hostile):
    """A result that is no text has an end, and can be read."""
    client = hostile.client()
    run = client.run("binary-result please", timeout_seconds=20, max_cost_micros=CAP, size="small")
    check_timeline(run, client.events(run["id"]))
    assert run["status"] in ("succeeded", "failed"), run
    if run["status"] == "succeeded":
        assert isinstance(run["output"], str)
    hostile.node.clean()
