"""Processes, databases and nodes that die in the middle of runs: every run still has one end, one charge and a timeline without a gap, and
nothing is left on the host. One control plane, with a Postgres of its own, and one node are shared; each test leaves them whole."""
import json
import os
import random
import signal
import subprocess
import threading

import control as control_rig
import fixtures
import node as node_rig
import pg
import pytest
import wait
from client import ENDS, check_chain, check_timeline, output_of, say, shell, turns
from follower import Follower

LEASE = {"lease_seconds": 8, "lease_renew_seconds": 1, "lease_grace_seconds": 1}


@pytest.fixture(scope="module")
def shared(bin_dir, image):
    with pg.Cluster(fsync=False) as cluster:
        control = control_rig.Control(cluster, bin_dir, **LEASE)
        control.keep_addresses()
        made = fixtures.Stack(control, node_rig.Node(control, bin_dir, image, max_vms=2).start())
        yield made
        made.close()


@pytest.fixture
def whole(shared):
    """The shared stack, and after the test: a node that works, a clean host, books that add up."""
    yield shared
    shared.node.clean()
    run = shared.client().run(turns(shell("echo fresh"), say("{{tool:1}}")))
    good(shared, run)
    assert "fresh" in run["output"]
    shared.node.clean()
    shared.control.check_ledger()


def timeline(stack, run):
    """Checks what must hold of every ended run, and returns its events."""
    rows = stack.control.event_rows(run["id"])
    events = [json.loads(data) for _, data, _ in rows]
    check_timeline(run, events)
    check_chain(rows)
    kinds = [e["type"] for e in events]
    assert len([k for k in kinds if k in ["run." + end for end in ENDS]]) == 1, kinds
    assert kinds.count("run.settled") == 1, kinds
    return events


def good(stack, run):
    assert run["status"] == "succeeded", (run["error"], [json.loads(data)["type"] for _, data, _ in stack.control.event_rows(run["id"])])
    return timeline(stack, run)


def kill_all(stack, role, how=signal.SIGKILL):
    pids = wait.until(lambda: stack.node.role_pids(role), 20, f"a {role} process", every=0.005)
    for pid in pids:
        try:
            os.kill(pid, how)
        except ProcessLookupError:
            pass


def logged(node, text, after=0):
    return text in node.log.read_text(errors="replace")[after:]


COUNT = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do echo line $i; sleep 0.2; done"


def counted(run, events):
    assert [line for line in output_of(events).splitlines() if line] == [f"line {i}" for i in range(1, 16)]
    assert "line 15" in run["output"]


# --- control plane and database ----------------------------------------------------------------------------------------------------------

@pytest.mark.guest
def test_control_is_killed(whole):
    """In the middle of a command, and with a run in the queue that nobody was offered yet."""
    control, client = whole.control, whole.client()
    running = client.create(prompt=turns(shell(COUNT), say("{{tool:1}}")))
    follower = Follower(client, running["id"])
    client.event(running["id"], "shell.output")
    waiting = [client.create(prompt=turns(say("waited"))) for _ in range(3)]
    control.stop(signal.SIGKILL)
    control.start()
    run = client.settled(running["id"], 60)
    counted(run, good(whole, run))
    follower.check(whole.control)
    assert follower.breaks >= 1
    for made in waiting:
        good(whole, client.settled(made["id"], 60))


@pytest.mark.guest
def test_database_is_away(whole):
    """Postgres ends as if it crashed and comes back three seconds later, in the middle of a command."""
    control, client = whole.control, whole.client()
    made = client.create(prompt=turns(shell(COUNT), say("{{tool:1}}")))
    follower = Follower(client, made["id"])
    client.event(made["id"], "shell.output")
    control.cluster.stop_server(signal.SIGQUIT)
    back = threading.Timer(3, control.cluster.start_server)
    back.start()
    answer = client.call("POST", "/v1/runs", json={"prompt": "x", "max_cost_micros": 1000}, timeout=20)
    assert answer.status_code == 503 and answer.headers["Content-Type"].startswith("application/problem+json"), answer.text
    back.join()
    control.until_ready()
    run = client.settled(made["id"], 60)
    counted(run, good(whole, run))
    follower.check(whole.control)


@pytest.mark.guest
def test_two_control_planes(whole, bin_dir, image):
    """A node that knows two: whichever it uses dies in a run, and the run goes on through the other."""
    control = whole.control
    extra = []
    node = None
    control.drain(whole.node.name)
    try:
        for _ in range(2):
            made = control_rig.Control(control.cluster, bin_dir, conninfo=control.conninfo, scripted=False, keyring=control.home / "keyring",
                                       tls_dir=control.home / "tls", **LEASE)
            extra.append(made)
            made.keep_addresses()
        first, second = extra
        first.operator_key = control.operator_key
        first.write_config(link_addresses=",".join(c.addresses["link"] for c in extra))
        first.stop()
        first.start()
        node = node_rig.Node(first, bin_dir, image, max_vms=2).start()
        client = whole.client()
        for victim in (first, second):
            made = client.create(prompt=turns(shell(COUNT), say("{{tool:1}}")))
            follower = Follower(client, made["id"])
            client.event(made["id"], "shell.output")
            victim.stop(signal.SIGKILL)
            run = client.settled(made["id"], 60)
            counted(run, good(whole, run))
            follower.check(whole.control)
            victim.start()
        node.clean()
    finally:
        control.undrain(whole.node.name)
        if node:
            node.close()
            control.revoke(node.name)
        for made in extra:
            made.close()


# --- the processes of a run --------------------------------------------------------------------------------------------------------------

@pytest.mark.guest
@pytest.mark.parametrize("role", ["broker", "channel", "vmm", "link"])
def test_a_process_dies(whole, role):
    """Before the guest's hello, in a model call, and right after the last one."""
    client = whole.client()

    made = client.create(prompt=turns(say("booted again")))
    client.event(made["id"], "run.claimed")
    wait.until(lambda: whole.node.role_pids("vmm"), 20, "a VMM", every=0.005)
    kill_all(whole, role)
    run = client.settled(made["id"], 60)
    timeline(whole, run)
    # A start that fails on the only host is the run's end, and says which process died.
    assert run["status"] == "succeeded" or role != "link" and run["error"]["code"] == "vm_start_failed" and run["cost_micros"] == 0, run["error"]

    made = client.create(prompt=turns(shell("echo before"), say("answered late", delay_ms=2500)))
    client.event(made["id"], "shell.exited")
    kill_all(whole, role)
    run = client.settled(made["id"], 60)
    timeline(whole, run)
    if role == "link":
        assert run["status"] == "succeeded", run["error"]
    else:
        code = {"broker": "broker_lost", "channel": "channel_lost", "vmm": "vm_crashed"}[role]
        assert run["error"] and run["error"]["code"] == code, (run["status"], run["error"])

    made = client.create(prompt=turns(say("the last word")))
    for _, kind, _ in client.stream(made["id"]):
        if kind == "model.call":
            for pid in whole.node.role_pids(role):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            break
    run = client.settled(made["id"], 60)
    timeline(whole, run)
    assert run["status"] in ("succeeded", "failed", "interrupted")
    if role == "link":
        assert run["status"] == "succeeded", run["error"]


# --- the node ----------------------------------------------------------------------------------------------------------------------------

@pytest.mark.guest
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_node_dies(whole, how):
    """While it boots a VM, and in a run."""
    client = whole.client()
    made = client.create(prompt=turns(say("booted again")))
    wait.until(lambda: whole.node.role_pids("vmm"), 20, "a VMM", every=0.005)
    code = whole.node.stop(how)
    assert code == (-signal.SIGKILL if how == signal.SIGKILL else 0)
    whole.node.start()
    run = client.settled(made["id"], 60)
    whole.node.clean()
    timeline(whole, run)
    assert run["status"] == "succeeded", (run["status"], run["error"])

    made = client.create(prompt=turns(shell("sleep 5; echo on"), say("done")))
    client.event(made["id"], "shell.started")
    whole.node.stop(how)
    whole.node.start()
    run = client.settled(made["id"], 60)
    events = timeline(whole, run)
    assert run["status"] == "succeeded", (run["status"], run["error"])
    assert [e["type"] for e in events].count("microvm.destroyed") == 1


def test_second_node_on_one_state(whole):
    done = subprocess.run([f"{whole.node.bin_dir}/noded", "--config", str(whole.node.file)], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode not in (0, -signal.SIGABRT), done.stderr
    assert f"another noded works on {whole.node.state_dir}: stop it first" in done.stdout + done.stderr


@pytest.mark.guest
def test_lease_runs_out(whole):
    """A link that stands still for longer than a lease: the VM is dead by then, what it reports later counts for nothing."""
    client = whole.client()
    made = client.create(prompt=turns(shell("while :; do echo tick; sleep 0.1; done"), say("never said")))
    client.event(made["id"], "shell.output")
    links = wait.until(lambda: whole.node.role_pids("link"), 10, "a link process")
    for pid in links:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait.until(lambda: not whole.node.role_pids("vmm"), LEASE["lease_seconds"] + 4, "the VM to be dead at the end of its lease")
        assert client.read(made["id"])["status"] == "running", "it was given up before its VM was sure to be dead"
        run = client.settled(made["id"], 30)
    finally:
        for pid in links:
            os.kill(pid, signal.SIGCONT)
    assert run["status"] == "interrupted" and run["error"]["code"] in ("node_lost", "lease_expired"), (run["status"], run["error"])
    before = whole.control.event_rows(made["id"])
    whole.node.clean(40)
    assert whole.control.event_rows(made["id"]) == before, "a fenced report changed the timeline"
    assert client.read(made["id"])["cost_micros"] == run["cost_micros"] and run["cost_micros"] + run["released_micros"] == run["reserved_micros"]
    check_chain(before)
    wait.until(lambda: logged(whole.node, f"orders a kill run={made['id']}") or logged(whole.node, f"run is fenced run={made['id']}"), 10, "the node to hear that its run is fenced")
    assert "microvm.destroyed" not in [json.loads(data)["type"] for _, data, _ in before], "its host could not say so any more"


@pytest.mark.guest
def test_slots_that_others_use(whole):
    """Processes that are not the node's have the ids of all its slots: it refuses, the run waits and costs nothing, and starts when they are gone."""
    client = whole.client()
    others = [subprocess.Popen(["sleep", "60"], user=whole.node.uid_base + 3 * slot, group=whole.node.uid_base, extra_groups=[]) for slot in range(2)]
    try:
        whole.node.stop()
        start = len(whole.node.log_tail(10**6))
        whole.node.start()
        wait.until(lambda: logged(whole.node, "have ids of its slots", start), 10, "the node to say so")
        made = client.create(prompt=turns(say("at last")))
        time_in_queue = [e["type"] for e in client.get(f"/v1/runs/{made['id']}/wait?timeout_seconds=2") and client.events(made["id"])]
        assert "microvm.ready" not in time_in_queue and len(time_in_queue) < 20, time_in_queue
    finally:
        for process in others:
            process.kill()
            process.wait()
    good(whole, client.settled(made["id"], 60))


@pytest.mark.guest
def test_storm(whole):
    """Many runs while everything dies again and again: each has one end and one charge, and the books add up."""
    dice = random.Random(7)
    client = whole.client()
    made = [client.create(prompt=turns(shell("echo one"), shell("sleep 0.5; echo two"), say("{{tool:2}}")))["id"] for _ in range(7)]
    for blow in ("control", "link", "control", "broker", "link", "control", "node", "channel", "control"):
        seen = len(whole.control.query("SELECT 1 FROM events WHERE run_id = ANY (%s) LIMIT 1000", made))
        more = seen + dice.randrange(1, 6)
        wait.until(lambda: len(whole.control.query("SELECT 1 FROM events WHERE run_id = ANY (%s) LIMIT 1000", made)) >= more
                   or all(client.read(run_id)["status"] in ENDS for run_id in made), 60, "the runs to go on")
        if blow == "control":
            whole.control.stop(signal.SIGKILL)
            whole.control.start()
        elif blow == "node":
            whole.node.stop(signal.SIGKILL)
            whole.node.start()
        else:
            for pid in whole.node.role_pids(blow):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
    ends = []
    for run_id in made:
        run = client.settled(run_id, 120)
        timeline(whole, run)
        ends.append(run["error"]["code"] if run["error"] else "")
    assert set(ends) <= {"", "vm_start_failed", "broker_lost", "channel_lost", "node_restarted"}, ends
    assert "" in ends
