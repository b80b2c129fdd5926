"""Which host a run goes to, by the real link: labels and selectors, hosts that cannot take what they are woken for. No guest boots: the
image is on paper, and what counts is who claims."""
import time

import pytest
from api_rig import problem
from client import say, turns

import control as control_rig
import images
import node as node_rig
import wait


@pytest.fixture
def hosts(cluster, bin_dir, tmp_path):
    """A control plane and three hosts, one of them labelled; by name."""
    images.make(tmp_path / "image", "choice")
    control = control_rig.Control(cluster, bin_dir)
    nodes = {}
    try:
        for name, labels in (("plain", None), ("blue", "pool=blue,disk=fast"), ("other", "pool=green")):
            nodes[name] = node_rig.Node(control, bin_dir, tmp_path / "image", name=name, labels=labels).start()
        yield control, nodes
    finally:
        for node in nodes.values():
            node.close()
        control.close()


def claimed_by(client, control, run, seconds):
    names = {node["id"]: node["name"] for node in control.operator("GET", "/nodes?limit=100")["data"]}
    event = wait.until(lambda: next((e for e in client.events(run) if e["type"] == "run.claimed"), None), seconds, "the run to be claimed")
    return names[event["data"]["node"]], event["t"]


def test_a_run_reaches_the_host_that_may_take_it_at_once(hosts, bin_dir):
    """All hosts are parked, and the one that is woken first is the wrong one more often than not: the wake is passed on, nobody waits for a
    poll's end. A selector that no host has is refused with what it is about."""
    control, _ = hosts
    client = control.new_client()
    control.operator("PATCH", f"/orgs/{client.org}", json={"selector": "pool=blue"})
    shown = {node["name"]: node["labels"] for node in control.operator("GET", "/nodes?limit=100")["data"]}
    assert shown == {"plain": None, "blue": "pool=blue,disk=fast", "other": "pool=green"}
    times = []
    for _ in range(6):
        run = client.create(prompt=turns(say("Never said.")))["id"]
        name, t = claimed_by(client, control, run, 30)
        assert name == "blue"
        times.append(t)
        client.cancel(run)
        client.settled(run)
    assert sorted(times)[3] < 2, f"a run waits for the end of a poll: {times}"
    control.operator("PATCH", f"/orgs/{client.org}", json={"selector": "pool=red"})
    body = problem(client.call("POST", "/v1/runs", json={"prompt": "x"}), 503, "no-node")
    assert "No host that your organization may use" in body["detail"], body
    began = time.monotonic()
    control.operator("PATCH", f"/orgs/{client.org}", json={"selector": ""})
    control.drain("plain")
    control.drain("blue")
    run = client.create(prompt=turns(say("Never said.")))["id"]
    assert claimed_by(client, control, run, 30)[0] == "other", "a draining host takes a run"
    assert time.monotonic() - began < 25
    client.cancel(run)
    client.settled(run)
    for word in ("a", "a=b,", "=b"):
        assert control.operator("PATCH", f"/orgs/{client.org}", expect=400, json={"selector": word})["errors"][0]["pointer"] == "#/selector"


def test_a_local_image_that_changes_takes_its_hosts_out(hosts, tmp_path):
    """Somebody works on the files of image_dir: no VM starts from them, no run is taken, and the list says why."""
    control, _ = hosts
    path = tmp_path / "image" / "rootfs.sqfs"
    path.write_bytes(path.read_bytes()[:-1])

    def out():
        nodes = control.operator("GET", "/nodes?limit=100")["data"]
        return all(n["image_state"] == "failed" and n["free"]["slots"] == 0 for n in nodes) and nodes
    nodes = wait.until(out, 60, "the hosts to notice")
    assert all("rootfs.sqfs" in n["image_note"] and "restart noded" in n["image_note"] for n in nodes), nodes
