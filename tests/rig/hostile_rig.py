"""A service whose node boots tests/rig/hostile_guest.c instead of our agent: its attacks, what each must end as, and what must hold after any
of them. Used by tests/e2e (some attacks) and tests/hostile (all of them)."""
import pathlib
import subprocess

import control as control_rig
import fixtures
import node as node_rig
from client import check_chain, check_timeline

CAP = 50_000
BROKEN = ("failed", "worker_protocol_error")
# What ends a run that nothing else ends: its own timeout.
OUTLAST = ("timed_out", "timed_out")
# attack: (status, code), words of the message
ATTACKS = {
    "zero-length": (BROKEN, "frame"),
    "oversized": (BROKEN, "frame"),
    "unknown-type": (BROKEN, "frame of type 200"),
    "host-frame": (BROKEN, "frame of type"),
    "second-hello": (BROKEN, "hello while"),
    "replay-ack": (BROKEN, "setup_ack while"),
    "early-event": (BROKEN, "event while"),
    "early-result": (BROKEN, "result_data while"),
    "early-call": (BROKEN, "call_data while"),
    "trickle": (OUTLAST, ""),
    "event-flood": (BROKEN, "credit"),
    "false-credit": (BROKEN, "credit"),
    "deaf": (BROKEN, "does not read"),
    "streams": (BROKEN, "call"),
    "many-calls": (("failed", "model_calls_exceeded"), "max_model_calls"),
    "calls-at-once": (BROKEN, "call"),
    "huge-call": (("failed", "budget_exceeded"), ""),
    "endless-call": (BROKEN, "a call is"),
    "forbidden-tools": (BROKEN, "tools that do not exist"),
    "forbidden-role": (BROKEN, ""),
    "skipped-call": (BROKEN, "numbered"),
    "lies": (("succeeded", None), ""),
    "invented-event": (BROKEN, "event"),
    "call-after-result": (("succeeded", None), ""),
    "endless-result": (BROKEN, "a result has"),
    "binary-fatal": (BROKEN, "fatal text"),
    "false-ack": (BROKEN, "setup_ack"),
    "restart": (("failed", "vm_crashed"), ""),
    "power-off": (("failed", "vm_crashed"), ""),
    "panic": (("failed", "vm_crashed"), ""),
    "console-flood": (OUTLAST, ""),
    "silent": (OUTLAST, ""),
}


def start(cluster, bin_dir, folder):
    """Packs the program where the agent would be, into `folder`, and starts a service with it."""
    top = pathlib.Path(__file__).resolve().parents[2]
    program = pathlib.Path(bin_dir).parent / "tests" / "rig" / "hostile_guest"
    base = subprocess.run([top / "deploy/guest-image/build", "--quiet"], capture_output=True, text=True, timeout=600, check=True).stdout.split()[-1]
    subprocess.run([top / "deploy/guest-image/pack", "--image", base, "--agent", program, "--out", folder], capture_output=True, timeout=60, check=True)
    control = control_rig.Control(cluster, bin_dir)
    return fixtures.Stack(control, node_rig.Node(control, bin_dir, folder, max_vms=4, boot_timeout_ms=60000).start())


def attack(stack, names, seconds=250):
    """Runs these attacks at once, and checks each."""
    client = stack.client()
    made = {name: client.create(prompt=f"{name} attack", timeout_seconds=5, max_cost_micros=CAP, max_model_calls=3, size="small")["id"] for name in names}
    wrong = []
    for name, run_id in made.items():
        run, events = client.settled(run_id, seconds), client.events(run_id)
        check_timeline(run, events)
        check_chain(stack.control.event_rows(run_id))
        check(name, run, events, wrong)
    assert not wrong, wrong
    stack.node.clean()
    stack.control.check_ledger()


def check(name, run, events, wrong):
    (status, code), words = ATTACKS[name]
    error = run["error"] or {"code": None, "message": ""}
    if (run["status"], error["code"]) != (status, code) or words not in error["message"]:
        wrong.append((name, run["status"], error))
    model = [e for e in events if e["type"] == "model.call" and e["data"]["attempts"] > 0]
    # Money: what the provider was really asked, and time on the host's clock. No word of the guest's.
    assert run["cost_micros"] <= CAP, name
    assert run["usage"]["model_calls"] == len(model) == (3 if name == "many-calls" else 0), (name, model)
    assert abs(run["cost"]["model_micros"] - sum(e["data"]["cost_micros"] for e in model)) <= len(model), name  # rounded once a call, once a run
    # Nobody but the host says what the host says.
    assert all(e["source"] == "guest" for e in events if e["type"].startswith(("shell.", "tool.", "worker.note"))), name
    assert all(e["source"] == "host" for e in events if e["type"].startswith(("model.", "microvm.", "worker.started"))), name
    assert sum(len(str(e)) for e in events) < 3_000_000, name
