"""noded on hosts that are not as they should be: directories of others, another cgroup_parent, a link that fails or grows, and a host that
runs out of room, descriptors and groups at every step of a start."""
import os
import pathlib
import re
import resource
import signal

import host
import pytest
import wait
from client import say, shell, turns
from room import Room

CGROUPS = pathlib.Path("/sys/fs/cgroup")


def groups_named(name):
    """Directories called `name` in every hierarchy."""
    return [path for top in [CGROUPS, *CGROUPS.iterdir()] if (path := top / name).is_dir()]


def refused(node):
    """noded does not start; what it says."""
    node.start(ready=False)
    assert node.process.wait(20) != 0
    node.process = None
    return node.log_tail()


def group_of(pid):
    return [line.rsplit("/", 1)[1] for line in pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines() if "/link_" in line]


@pytest.fixture
def quiet(make_stack):
    """A control plane and a node that is not started yet."""
    return make_stack(start_node=False)


def test_directories_that_others_can_change_are_refused(quiet):
    node = quiet.node
    for key in ("state_dir", "run_dir"):
        path = pathlib.Path(node.config[key])
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        said = refused(node)
        assert str(path) in said and "chmod go-w" in said
        path.chmod(0o700)
        os.chown(path, 12345, 12345)
        said = refused(node)
        assert f"{path} belongs to user 12345" in said and "chown 0" in said
        os.chown(path, 0, 0)
    node.start()


def test_an_earlier_cgroup_parent_is_not_left_behind(quiet):
    node, first = quiet.node, quiet.node.cgroup_name
    node.write_config(cgroup_parent=f"/{first}/a/b")
    node.start()
    assert groups_named(f"{first}/a/b")
    # What an earlier noded could not remove, and a group that is none of ours.
    link = group_of(node.role_pids("link")[0])[0]
    tag = link.rsplit(".", 1)[1]
    node.stop(signal.SIGKILL)
    wait.until(lambda: not node.role_pids("link"), 20, "the end of link")
    (groups_named(f"{first}/a/b")[0] / f"vm_{'0' * 32}.vmm.{tag}").mkdir()
    try:
        node.write_config(cgroup_parent=f"/{first}-2")
        node.start()
        wait.until(lambda: not groups_named(first), 20, "the end of the parent")
        node.stop()
        assert len(groups_named(f"{first}-2")) > 0
        other = groups_named(f"{first}-2")[0] / "of-somebody-else"
        other.mkdir()
        node.write_config(cgroup_parent=f"/{first}")
        node.start()
        assert other.is_dir() and groups_named(first)
        other.rmdir()
        node.stop()
        node.start()                                   # what could not be removed then is removed now
        assert not groups_named(f"{first}-2")
    finally:
        host.remove_cgroups(f"{first}-2")


def test_link_has_a_group_with_limits(quiet):
    node = quiet.node.start()
    pid = node.role_pids("link")[0]
    names = group_of(pid)
    assert names and len(set(names)) == 1
    found = [path for root, folders, _ in os.walk(CGROUPS) for path in [pathlib.Path(root)] if path.name == names[0]]
    limits = {}
    for path in found:
        for file in ("memory.max", "memory.limit_in_bytes", "pids.max"):
            if (path / file).exists():
                limits[file] = int((path / file).read_text())
    assert 0 < limits.get("memory.max", limits.get("memory.limit_in_bytes", 0)) <= 1 << 30
    assert 0 < limits["pids.max"] <= 256
    os.kill(pid, signal.SIGKILL)
    again = wait.until(lambda: [p for p in node.role_pids("link") if p != pid], 20, "another link")[0]
    assert group_of(again) and group_of(again) != names
    wait.until(lambda: not any(p.is_dir() for p in found), 20, "the end of the first link's group")
    node.stop()
    assert not [p for p in groups_named(node.cgroup_name) for q in p.iterdir() if q.name.startswith("link_")]


def test_a_link_that_dies_and_dies_keeps_a_short_lease(make_stack):
    """Killed as soon as it is there, eight times: the lease of 8 s never runs out."""
    stack = make_stack(control={"lease_seconds": 8, "lease_renew_seconds": 1, "lease_grace_seconds": 1})
    node, last = stack.node, None
    for _ in range(8):
        pid = wait.until(lambda: [p for p in node.role_pids("link") if p != last], 20, "a link")[0]
        os.kill(pid, signal.SIGKILL)
        last = pid
    waits = [int(line.split("restart_ms=")[1].split()[0].rstrip('"}')) for line in node.log.read_text().splitlines() if "restart_ms=" in line]
    assert len(waits) >= 7 and max(waits) <= 2000, waits
    wait.until(lambda: stack.control.node_live(node.name), 20, "the node to be live")


@pytest.mark.guest
def test_a_disk_that_is_full_when_the_start_is_to_be_noted(quiet):
    """The VM boots, and the journal cannot note that its start is asked for: a failed start, at once and with the reason."""
    node, client = quiet.node, quiet.client()
    state = Room(node.state_dir, "size=96m")
    try:
        node.start()
        made = client.create(prompt=turns(say("never said")), timeout_seconds=60)
        journal = pathlib.Path(node.state_dir) / "journal"
        pid = wait.until(lambda: node.role_pids("vmm"), 60, "the VMM")[0]
        wait.until(lambda: any(pid.to_bytes(4, "little") in p.read_bytes() for p in journal.glob("vm_*")), 20, "the VMM in the journal")
        state.fill(0)
        done = client.settled(made["id"], 120)
        assert done["status"] == "failed" and done["error"]["code"] == "vm_start_failed", done["error"]
        assert done["cost_micros"] == 0 and "No space" in done["error"]["message"]
        state.empty()
        node.clean()
    finally:
        node.stop()
        state.close()


@pytest.mark.guest
def test_a_host_that_runs_out_of_something_fails_starts_and_recovers(quiet):
    """At each step of a start something is missing. On a full disk no run is tried: it waits, and starts when there is room. Without anything
    else it ends with the reason, nothing stays, and when it is there again runs run."""
    node, client = quiet.node, quiet.client()
    state, run = Room(node.state_dir, "size=96m"), Room(node.run_dir, "size=4m,nr_inodes=200")
    top = None
    try:
        node.start()
        keeper = node.process.pid
        top = next(p for p in groups_named(node.cgroup_name) if (p / "cgroup.max.descendants").exists())
        soft, hard = resource.prlimit(keeper, resource.RLIMIT_NOFILE)

        def fails(what):
            done = client.run(turns(say("never said")), seconds=120, timeout_seconds=60)
            assert done["status"] == "failed" and done["error"]["code"] == "vm_start_failed", (what, done["error"])
            assert done["cost_micros"] == 0
            node.clean()
            return done["error"]["message"]

        state.fill(0)
        made = client.create(prompt=turns(shell("echo here"), say("done")))["id"]
        refused = f"run={made} refused failed=0 code=no_capacity"
        wait.until(lambda: len(node.logged(refused)) >= 4, 60, "more refusals than a run has attempts")
        assert all("MiB are free on the disk of" in line for line in node.logged(refused))
        waiting = wait.until(lambda: client.read(made)["waiting_for"], 20, "what it waits for")
        assert waiting["reason"] == "capacity" and client.read(made)["status"] == "queued"
        assert not node.logged(" admitted ") and not os.listdir(pathlib.Path(node.state_dir) / "journal")
        state.empty()
        done = client.settled(made, 200)
        assert done["status"] == "succeeded", done["error"]
        assert re.findall(rf"run={made} .* admitted .* attempt=(\d+)", "\n".join(node.logged("admitted"))) == ["1"], "a refusal is not an attempt"
        node.clean()

        run.take_inodes()
        assert "No space" in fails("directories")
        run.empty()
        (top / "cgroup.max.descendants").write_text("1")
        assert "cgroup" in fails("groups")
        (top / "cgroup.max.descendants").write_text("max")
        resource.prlimit(keeper, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{keeper}/fd")) + 2, hard))
        assert "Too many open files" in fails("descriptors")
        resource.prlimit(keeper, resource.RLIMIT_NOFILE, (soft, hard))
        done = client.run(turns(shell("echo here"), say("done")), seconds=200)
        assert done["status"] == "succeeded", done["error"]
        assert quiet.control.node_live(node.name)
        quiet.control.check_ledger()
    finally:
        if top:
            (top / "cgroup.max.descendants").write_text("max")
        node.stop()
        state.close()
        run.close()
