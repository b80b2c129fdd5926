"""noded is killed, stopped, upgraded and started again while runs go on: they do, and what cannot is ended and told."""
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess

import pytest
import requests
import wait
from client import check_chain, check_timeline, output_of, say, shell, turns
from follower import Follower

SLOW = {"delay_ms": 45000}


def whole(stack, run_id, follower=None):
    """The run's end, and all that must hold of it: one end, one chain, a stream without a gap."""
    client = stack.client_of[run_id]
    run = client.settled(run_id, 150)
    events = client.events(run_id)
    check_timeline(run, events)
    check_chain(stack.control.event_rows(run_id))
    kinds = [e["type"] for e in events]
    assert kinds.count("run.settled") == 1 and kinds.count("worker.started") <= 1, kinds
    if follower:
        follower.check(stack.control)
    return run, events


def good(stack, run_id, follower=None):
    run, events = whole(stack, run_id, follower)
    assert run["status"] == "succeeded", (run["error"], [e["type"] for e in events])
    assert [e["type"] for e in events].count("microvm.destroyed") == 1
    return run, events


def adopted(stack, run_id):
    return [line for line in stack.node.logged(f"run={run_id} ") if " adopted state=" in line]


@pytest.fixture
def restartable(make_stack):
    """make(node={...}, control={...}) -> a stack whose runs remember their client."""
    def make(**more):
        stack = make_stack(control={"lease_seconds": 60, **more.pop("control", {})}, node={"max_vms": 6, "vcpus": 16, "memory_mib": 8192, **more.pop("node", {})})
        stack.client_of, client = {}, stack.client()

        def begin(*script, **fields):
            made = client.create(prompt=turns(*script), **fields)["id"]
            stack.client_of[made] = client
            return made
        stack.begin, stack.one = begin, client
        return stack
    return make


def clean(stack):
    stack.node.clean(40)
    stack.control.check_ledger()


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_killed_while_runs_are_at_every_step(restartable):
    """At work in a command, in a model call, at its end, booting, and waiting for its turn to boot; killed twice."""
    stack = restartable()
    model = stack.begin(say("late", **SLOW))
    stack.one.event(model, "worker.started", 90)
    command = stack.begin(shell("echo begun; sleep 25; echo ended"), say("{{tool:1}}"))
    stack.one.event(command, "shell.started", 90)
    ending = stack.begin(say("soon over", delay_ms=1500))
    stack.one.event(ending, "worker.started", 90)
    followers = {run: Follower(stack.one, run, 200) for run in (command, ending, model)}
    booting = stack.begin(say("booted"))
    wait.until(lambda: stack.node.logged(f"run={booting} "), 30, "the run to be on the host")
    waiting = stack.begin(shell("echo here"), say("waited"))
    wait.until(lambda: stack.node.logged(f"run={waiting} "), 30, "the run to be on the host")
    stack.node.restart()
    wait.until(lambda: adopted(stack, command) and adopted(stack, model), 30, "runs to be taken over")
    stack.node.restart()
    for run_id in (command, ending, model, booting, waiting):
        good(stack, run_id, followers.get(run_id))
    assert "ended" in stack.one.read(command)["output"] and len(adopted(stack, command)) == 2 and len(adopted(stack, model)) >= 1
    assert output_of(stack.one.events(command)) == "begun\nended\n"
    assert not stack.node.logged("ERROR"), stack.node.logged("ERROR")
    clean(stack)


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_upgrade(restartable, tmp_path, bin_dir):
    """SIGTERM leaves the run, another binary takes it over; cancelled while none was there, it hears of it from the next."""
    stack = restartable()
    cancelled = stack.begin(shell("sleep 100"), say("never said"))
    goes_on = stack.begin(shell("sleep 12; echo ended"), say("{{tool:1}}"))
    for run_id in (cancelled, goes_on):
        stack.one.event(run_id, "shell.started", 90)
    assert stack.node.stop(signal.SIGTERM) == 0
    assert len(stack.node.role_pids("vmm")) == 2 and not stack.node.role_pids("link")
    assert len(stack.node.logged("stays for the next noded")) == 2
    stack.one.cancel(cancelled)
    other = tmp_path / "bin"
    other.mkdir()
    shutil.copy(pathlib.Path(bin_dir, "noded"), other / "noded")
    stack.node.bin_dir = str(other)
    stack.node.start()
    assert os.readlink(f"/proc/{stack.node.process.pid}/exe") == str(other / "noded")
    run, _ = whole(stack, cancelled)
    assert run["status"] == "cancelled", run
    run, _ = good(stack, goes_on)
    assert run["output"].startswith("ended") and adopted(stack, goes_on)
    clean(stack)


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_what_dies_while_noded_is_away(restartable):
    """Broker, VMM, and a run that ends by itself; each is told as what it is."""
    stack = restartable()
    without_vmm = stack.begin(shell("sleep 100"), say("never said"))
    without_broker = stack.begin(shell("sleep 100"), say("never said"))
    over = stack.begin(shell("sleep 6; echo ended"), say("{{tool:1}}"))
    pids = {}
    for run_id in (without_vmm, without_broker, over):
        stack.one.event(run_id, "shell.started", 90)
        pids[run_id] = processes_of(stack, run_id)
    stack.node.stop(signal.SIGKILL)
    os.kill(pids[without_vmm]["vmm"], signal.SIGKILL)
    os.kill(pids[without_broker]["broker"], signal.SIGKILL)
    wait.until(lambda: not alive(pids[over]["vmm"]), 60, "the end of the run's VM, without a noded")
    stack.node.start()
    run, _ = good(stack, over)
    assert run["output"].startswith("ended")
    run, _ = whole(stack, without_vmm)
    assert (run["status"], run["error"]["code"]) == ("failed", "vm_crashed"), run
    run, _ = whole(stack, without_broker)
    assert (run["status"], run["error"]["code"]) == ("interrupted", "broker_lost"), run
    clean(stack)


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_away_for_longer_than_the_lease(restartable):
    """The VM dies by its broker's hand; who comes late reports what it cost, if anybody still wants to hear it."""
    stack = restartable(control={"lease_seconds": 8, "lease_renew_seconds": 1, "lease_grace_seconds": 1})
    run_id = stack.begin(shell("sleep 100"), say("never said"))
    stack.one.event(run_id, "shell.started", 90)
    vmm = processes_of(stack, run_id)["vmm"]
    stack.node.stop(signal.SIGKILL)
    wait.until(lambda: not alive(vmm), 30, "the VM to be killed by its broker")
    run = stack.one.settled(run_id, 60)
    assert run["status"] == "interrupted" and run["error"]["code"] in ("node_lost", "lease_expired"), run
    stack.node.start()
    clean(stack)
    assert stack.one.run(turns(say("fresh")))["status"] == "succeeded"


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_warm_machines_are_taken_over(restartable):
    """A VM that waits for a run waits on beyond noded, and serves the first run of the next one."""
    stack = restartable(node={"warm_min": 1, "warm_max": 1, "start_mode": "cold"})
    wait.until(lambda: stack.node.logged("warm and ready"), 90, "a warm VM")
    vmm = stack.node.role_pids("vmm")
    assert len(vmm) == 1
    stack.node.restart()
    wait.until(lambda: stack.node.logged(" adopted state="), 30, "the warm VM to be taken over")
    assert stack.node.role_pids("vmm") == vmm
    run_id = stack.begin(say("at once"))
    _, events = good(stack, run_id)
    assert next(e["data"]["start_mode"] for e in events if e["type"] == "worker.started") == "warm"
    stack.node.stop(signal.SIGINT)
    assert not stack.node.role_pids("vmm")
    stack.node.start()


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_another_configuration_cannot_take_over(restartable):
    """With other user ids the VM could not be told from others': killed, and told."""
    stack = restartable()
    run_id = stack.begin(shell("sleep 100"), say("never said"))
    stack.one.event(run_id, "shell.started", 90)
    pids = processes_of(stack, run_id)
    stack.node.stop(signal.SIGTERM)
    stack.node.uid_base += 64 * 3
    stack.node.write_config(uid_base=stack.node.uid_base)
    stack.node.start()
    run, _ = whole(stack, run_id)
    assert (run["status"], run["error"]["code"]) == ("interrupted", "node_restarted") and "uid_base" in run["error"]["message"], run
    assert not any(alive(pid) for pid in pids.values())
    clean(stack)


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_what_belongs_to_nothing_is_found(restartable):
    """While a run goes on, things of no VM appear, and its own journal entry goes: put right within a round, said, counted; the run does not notice."""
    stack = restartable(node={"reconcile_seconds": 1})
    node, gone = stack.node, "vm_" + "0" * 32
    first = stack.begin(shell("true"), say("done"))
    entry = pathlib.Path(node.state_dir, "journal")
    stale = wait.until(lambda: [(p.name, p.read_bytes()) for p in entry.iterdir() if p.name.startswith("vm_") and len(p.name) == 35], 30, "a journal entry")[0]
    good(stack, first)
    run_id = stack.begin(shell("sleep 10; echo ended"), say("{{tool:1}}"))
    stack.one.event(run_id, "shell.started", 90)
    vmm = pathlib.Path("/proc", str(processes_of(stack, run_id)["vmm"]), "cgroup").read_text().strip().splitlines()[-1].split("::")[1]
    parent = next(p for p in (pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/sys/fs/cgroup/unified")) if (p / vmm[1:]).is_dir()) / vmm[1:]
    group = parent.parent / f"{gone}.vmm.{parent.name.rsplit('.', 1)[1]}"
    group.mkdir()
    with subprocess.Popen(["sleep", "1000"]) as stray:
        (group / "cgroup.procs").write_text(str(stray.pid))
        assert stray.wait(20) == -signal.SIGKILL
    wait.until(lambda: not group.exists(), 20, "the end of the group")
    there = pathlib.Path(node.run_dir, "vm", gone)
    (there / "broker").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(there / "ctl"))
    wait.until(lambda: not there.exists(), 20, "the end of the directory")
    (entry / stale[0]).write_bytes(stale[1])  # of a run that is over: what it names is dead, and controld knows the end
    wait.until(lambda: not (entry / stale[0]).exists(), 30, "the end of the stale entry")
    own = next(p for p in entry.iterdir() if p.name in vmm)
    own.unlink()
    wait.until(own.exists, 20, "the run's own entry")
    with subprocess.Popen(["sleep", "1000"], user=node.uid_base + 3 * 5) as other:
        wait.until(lambda: node.logged("have ids of its slots"), 20, "a stranger on an id of ours")
        assert other.poll() is None  # it may be another noded's
        other.kill()
    good(stack, run_id)
    text = requests.get(f"http://{node.logged('metrics address=')[-1].split('address=')[1].split()[0]}/metrics", timeout=10).text
    found = {kind: int(float(n)) for kind, n in re.findall(r'leftovers_total\{kind="(\w+)"\} (\S+)', text)}
    assert all(found[kind] >= 1 for kind in ("cgroup", "process", "directory", "socket", "journal")), (found, text)
    assert found["slot"] == found["lease"] == found["disk"] == 0, found
    clean(stack)


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(stack, run_id):
    """Pids of the run's broker, channel and VMM, by the control groups of its VM."""
    vm = next(line for line in stack.node.logged(f"run={run_id} ") if " admitted " in line).split(" vm=")[1].split()[0]
    found = {}
    for role in ("broker", "channel", "vmm"):
        for pid in stack.node.role_pids(role):
            if f"/{vm}.{role}." in pathlib.Path(f"/proc/{pid}/cgroup").read_text():
                found[role] = pid
    assert len(found) == 3, found
    return found
