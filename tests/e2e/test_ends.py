"""Each way a run can end, with its status, its code, its money and nothing left on the host."""
import os
import signal

import pytest
import vmm_rig
import wait
from client import check_timeline, say, shell, turns


def ended(client, run, status, code):
    events = client.events(run["id"])
    assert run["status"] == status, (run["error"], [e["type"] for e in events])
    assert (run["error"]["code"] if run["error"] else "") == code, run["error"]
    check_timeline(run, events)
    return events


@pytest.mark.guest
def test_succeeded(client):
    run = client.run(turns(say("All done.")))
    ended(client, run, "succeeded", "")
    assert run["output"] == "All done."


@pytest.mark.guest
def test_failed_by_the_model(client):
    run = client.run(turns({"http": {"status": 401, "body": {"error": {"message": "bad key"}}}}))
    ended(client, run, "failed", "model_error")
    assert "401" in run["error"]["message"]
    assert run["usage"]["model_calls"] == 0 or run["cost"]["model_micros"] == 0


@pytest.mark.guest
def test_failed_by_model_calls(client):
    run = client.run(turns(shell("true"), shell("true"), shell("true")), max_model_calls=2)
    ended(client, run, "failed", "model_calls_exceeded")
    assert run["usage"]["model_calls"] == 2


@pytest.mark.guest
def test_failed_by_the_cap_in_a_call(client):
    """The first call fits, the next one's worst case does not: it is not made."""
    long = "x" * 20000
    run = client.run(turns(shell("head -c 200000 /dev/zero | tr '\\0' y", timeout_seconds=20), say("never said")) + long, max_cost_micros=14000)
    ended(client, run, "failed", "budget_exceeded")
    assert run["cost_micros"] <= 14000
    assert "14000" in run["error"]["message"].replace(",", "") or "0.014" in run["error"]["message"]


@pytest.mark.guest
def test_failed_by_the_cap_of_compute(make_stack):
    """Compute alone runs into the cap while a command sleeps."""
    stack = make_stack(node={"max_vms": 1})
    stack.control.set_prices(compute_micros_per_million_ms=4_000_000)  # 4,000 micros a second
    client = stack.client()
    run = client.run(turns(shell("sleep 100"), say("never said")), max_cost_micros=30000)
    ended(client, run, "failed", "budget_exceeded")
    assert run["cost_micros"] <= 30000
    assert run["usage"]["compute_ms"] < 60000


@pytest.mark.guest
def test_failed_by_too_much_output(client):
    """An answer of over 1 MiB: five tool outputs of 250,000 bytes in one text."""
    big = shell("head -c 250000 /dev/zero | tr '\\0' y")
    run = client.run(turns(big, big, big, big, big, say("".join(f"{{{{tool:{n}}}}}" for n in range(1, 6)))), max_cost_micros=10_000_000)
    ended(client, run, "failed", "output_too_large")
    assert run["output"] is None


@pytest.mark.guest
def test_timed_out(client):
    run = client.run(turns(shell("sleep 60"), say("never said")), timeout_seconds=3)
    events = ended(client, run, "timed_out", "timed_out")
    started = next(e["t"] for e in events if e["type"] == "worker.started")
    destroyed = next(e["t"] for e in events if e["type"] == "microvm.destroyed")
    assert 3 <= destroyed - started < 6


def test_cancelled_while_queued(make_stack):
    stack = make_stack(node={"max_vms": 1})
    client = stack.client()
    first = client.create(prompt=turns(shell("sleep 30"), say("x")))
    client.event(first["id"], "run.claimed")
    second = client.create(prompt=turns(say("x")))
    client.cancel(second["id"])
    run = client.settled(second["id"], 10)
    ended(client, run, "cancelled", "cancelled")
    assert run["cost_micros"] == 0 and run["usage"]["compute_ms"] == 0
    client.cancel(first["id"])
    client.settled(first["id"])


@pytest.mark.guest
def test_cancelled_while_running(client):
    run = client.create(prompt=turns(shell("sleep 100"), say("never said")))
    client.event(run["id"], "shell.started")
    client.cancel(run["id"])
    client.cancel(run["id"])
    run = client.settled(run["id"], 30)
    ended(client, run, "cancelled", "cancelled")
    client.cancel(run["id"])  # after the end too


def kill_role(stack, role, how=signal.SIGKILL):
    pids = wait.until(lambda: stack.node.role_pids(role), 10, f"a {role} process")
    for pid in pids:
        os.kill(pid, how)


@pytest.mark.guest
@pytest.mark.parametrize("role,status,codes", [("vmm", "failed", ("vm_crashed",)), ("channel", "interrupted", ("channel_lost",)),
                                               ("broker", "interrupted", ("broker_lost",))])
def test_a_process_of_the_run_is_killed(make_stack, role, status, codes):
    stack = make_stack(node={"max_vms": 1})
    client = stack.client()
    run = client.create(prompt=turns(shell("sleep 100"), say("never said")))
    client.event(run["id"], "shell.started")
    kill_role(stack, role)
    run = client.settled(run["id"], 30)
    assert run["error"]["code"] in codes
    ended(client, run, status, run["error"]["code"])
    stack.node.clean()
    again = client.run(turns(say("fresh")))
    ended(client, again, "succeeded", "")


@pytest.mark.guest
def test_link_is_killed_and_the_run_goes_on(make_stack):
    stack = make_stack(node={"max_vms": 1})
    client = stack.client()
    run = client.create(prompt=turns(shell("sleep 3; echo after"), say("done: {{tool:1}}")))
    client.event(run["id"], "shell.started")
    kill_role(stack, "link")
    run = client.settled(run["id"], 60)
    ended(client, run, "succeeded", "")
    assert "after" in run["output"]


@pytest.mark.guest
def test_node_is_stopped_for_good(make_stack):
    """Ctrl-C ends what runs, and says so."""
    stack = make_stack(node={"max_vms": 1})
    client = stack.client()
    run = client.create(prompt=turns(shell("sleep 100"), say("never said")))
    client.event(run["id"], "shell.started")
    assert stack.node.stop(signal.SIGINT) == 0
    assert not stack.node.role_pids("vmm") and not stack.node.role_pids("broker")
    stack.node.start()
    run = client.settled(run["id"], 60)
    events = ended(client, run, "interrupted", "node_restarted")
    assert [e["type"] for e in events].count("microvm.destroyed") == 1
    stack.node.clean()
    ended(client, client.run(turns(say("fresh"))), "succeeded", "")


@pytest.mark.guest
def test_node_lost(make_stack):
    stack = make_stack(control={"lease_seconds": 6, "lease_renew_seconds": 1, "lease_grace_seconds": 1}, node={"max_vms": 1})
    client = stack.client()
    run = client.create(prompt=turns(shell("sleep 100"), say("never said")))
    client.event(run["id"], "shell.started")
    stack.node.process.send_signal(signal.SIGSTOP)
    for pid in stack.node.role_pids("link"):
        os.kill(pid, signal.SIGSTOP)
    run = client.settled(run["id"], 40)
    assert run["status"] == "interrupted" and run["error"]["code"] in ("node_lost", "lease_expired")
    # The broker killed its VM at the deadline of the lease although keeper and link stand still.
    wait.until(lambda: not stack.node.role_pids("vmm"), 10, "the VM to be gone by its lease")
    for pid in stack.node.role_pids("link"):
        os.kill(pid, signal.SIGCONT)
    stack.node.process.send_signal(signal.SIGCONT)
    stack.node.clean(40)
    ended(client, client.run(turns(say("fresh"))), "succeeded", "")


def test_vmm_binary_is_gone(make_stack, tmp_path):
    """With the VMM moved away the run fails at once, and says why."""
    program, config = vmm_rig.own_program(tmp_path)
    stack = make_stack(node={**config, "max_vms": 1})
    client = stack.client()
    program.rename(tmp_path / "moved-away")
    run = client.run(turns(say("never said")), 60)
    ended(client, run, "failed", "vm_start_failed")
    assert program.name in run["error"]["message"]
    assert run["cost_micros"] == 0


def test_no_capacity(make_stack):
    """A queue that does not move: the run ends by its age and costs nothing."""
    stack = make_stack(control={"queue_timeout_seconds": 3})
    client = stack.client()
    stack.control.drain(stack.node.name)
    run = client.run(turns(say("never said")), 40)
    ended(client, run, "failed", "no_capacity")
    assert run["cost_micros"] == 0
