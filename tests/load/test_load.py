"""200 runs of eight kinds by 8 clients on one node, in the build that is shipped: each ends as it must with its own nonce, the ledger is
proven, nothing is left on the host, and no long-lived process grows. EPHEMERAL_LOAD_RUNS sets another number of runs."""
import base64
import os
import secrets
import statistics
import threading
import time

import pytest
from client import check_timeline, output_of, say, shell, turns
from sampler import Sampler

RUNS, CLIENTS = int(os.environ.get("EPHEMERAL_LOAD_RUNS", "200")), 8
BIG = 300_000


def succeeds(run, events, nonce):
    assert run["status"] == "succeeded", run["error"]
    assert nonce in run["output"] and nonce in output_of(events)


def answers(run, events, nonce):
    assert run["status"] == "succeeded" and run["output"] == f"no shell {nonce}", run
    assert not any(e["type"].startswith("shell.") for e in events)


def prints(run, events, nonce):
    succeeds(run, events, nonce)
    assert len(output_of(events)) > 60_000, "most of the output is missing"


def ends(status, code):
    def check(run, events, nonce):
        assert (run["status"], run["error"]["code"]) == (status, code), run["error"]
    return check


def kinds(nonce):
    """name -> (fields of the request, what holds at its end, the event after which it is cancelled)."""
    file = {"path": "data/nonce.txt", "content_base64": base64.b64encode(nonce.encode() * 200).decode()}
    return {
        "shell": ({"prompt": turns(shell(f"echo {nonce} > nonce; cat nonce"), say("{{tool:1}}"))}, succeeds, None),
        "two calls": ({"prompt": turns(shell(f"echo {nonce}"), shell("id -un; exit 3"), say("{{tool:1}} {{tool:2}}"))}, succeeds, None),
        "files": ({"prompt": turns(shell("head -c 32 data/nonce.txt"), say("{{tool:1}}")), "files": [file]}, succeeds, None),
        "output": ({"prompt": turns(shell(f"echo {nonce}; head -c {BIG} /dev/zero | tr '\\0' y; echo {nonce}"), say(nonce))}, prints, None),
        "no shell": ({"prompt": turns(say(f"no shell {nonce}")), "shell": False}, answers, None),
        "cancelled": ({"prompt": turns(shell(f"echo {nonce}; sleep 300"), say("never said"))}, ends("cancelled", "cancelled"), "shell.output"),
        "timed out": ({"prompt": turns(shell(f"echo {nonce}; sleep 300"), say("never said")), "timeout_seconds": 2}, ends("timed_out", "timed_out"), None),
        "model fails": ({"prompt": turns(shell(f"echo {nonce}"), {"http": {"status": 401, "body": {"error": {"message": "no"}}}})},
                        ends("failed", "model_error"), None),
    }


KINDS = list(kinds(""))


class Load:
    """The clients' threads and what they found."""

    def __init__(self, sampler):
        self.sampler, self.lock = sampler, threading.Lock()
        self.failures, self.done, self.nonces = [], {kind: [] for kind in KINDS}, {}

    def one(self, client, number):
        nonce, kind = secrets.token_hex(16), KINDS[number % len(KINDS)]
        fields, check, cancel_at = kinds(nonce)[kind]
        began = time.monotonic()
        run = client.create(**fields)
        if cancel_at:
            client.event(run["id"], cancel_at, 600)
            client.cancel(run["id"])
        run = client.settled(run["id"], 600)
        events = client.events(run["id"])
        check_timeline(run, events)
        check(run, events, nonce)
        with self.lock:
            self.nonces[nonce] = run["id"]
            self.done[kind].append(time.monotonic() - began)

    def drive(self, client, first):
        for number in range(first, RUNS, CLIENTS):
            try:
                # Every client meets every kind.
                self.one(client, number + number // CLIENTS)
            except Exception as error:  # noqa: BLE001 - every kind of failure is reported below
                self.failures.append(f"run {number}: {error!r}"[:700])
            with self.lock:
                self.sampler.mark((sum(map(len, self.done.values())) + len(self.failures)) / RUNS)

    def table(self, seconds):
        lines = [f"\n  {'kind':12} {'runs':>5} {'p50 s':>7} {'max s':>7}"]
        lines += [f"  {kind:12} {len(took):5} {statistics.median(took):7.1f} {max(took):7.1f}" for kind, took in self.done.items() if took]
        return "\n".join([*lines, f"  {sum(map(len, self.done.values()))} runs in {seconds:.0f} s: {60 * RUNS / seconds:.1f} a minute"])


def watched(stack):
    link, = stack.node.role_pids("link")
    return {"controld": stack.control.process.pid, "keeper": stack.node.process.pid, "link": link}


@pytest.mark.guest
@pytest.mark.timeout(2700)
def test_runs_by_eight_clients(load_stack, report):
    stack = load_stack(max_vms=8)
    clients = [stack.client() for _ in range(CLIENTS)]
    with Sampler(watched(stack)) as sampler:
        load = Load(sampler)
        threads = [threading.Thread(target=load.drive, args=(client, n)) for n, client in enumerate(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2500)
    report(load.table(sampler.seconds), sampler.table())
    assert not load.failures, f"{len(load.failures)} failures\n" + "\n".join(load.failures[:20])
    assert len(load.nonces) == len(set(load.nonces.values())) == RUNS
    for client in clients:
        me = client.get("/v1/me")
        assert me["reserved_micros"] == 0 and me["runs"] == {"queued": 0, "running": 0}, me
    # What another run printed stands in no run's record.
    rows = stack.control.query("SELECT run_id, convert_from(bytes, 'UTF8') FROM events")
    for run_id, text in rows:
        foreign = [other for nonce, other in load.nonces.items() if nonce in text and not other.endswith(run_id)]
        assert not foreign, f"{run_id} has the nonce of {foreign}"
    stack.node.clean()
    stack.control.check_ledger()
    assert not sampler.bounded(), sampler.bounded()
