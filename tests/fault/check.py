"""What must hold after every cell: one end, one charge, a whole timeline and stream, a valid receipt, a meter that agrees with the provider's
own tally, and a next run that is fresh."""
import ctypes
import hashlib
import json
import pathlib
import re
import struct

from cells import FENCED, GOOD, LOST
from provider import price

from client import ENDS, check_chain, check_timeline, output_of, say, shell, turns

SODIUM = ctypes.CDLL("libsodium.so.23")
USAGE = ("model_calls", "input_tokens", "cached_input_tokens", "output_tokens", "web_requests", "web_searches", "compute_ms", "unmetered_model_micros")


def check_run(scene, run_id, follower, ends):
    """Waits for the run's settled end and checks all of it; returns the run."""
    stack, client = scene.stack, scene.client
    run = client.settled(run_id, 200)
    end = (run["status"], run["error"]["code"] if run["error"] else None)
    rows = stack.control.event_rows(run_id)
    events = [json.loads(data) for _, data, _ in rows]
    kinds = [e["type"] for e in events]
    assert end in ends, f"ended {end} {run['error']}, legal are {sorted(map(str, ends))}: {kinds}"
    fenced = end in FENCED
    check_timeline(run, events, fenced=fenced)
    check_chain(rows)
    assert len([k for k in kinds if k in ["run." + name for name in ENDS]]) == 1, kinds
    assert kinds.count("run.settled") == 1, kinds
    check_work(run, events)
    check_ledger_rows(stack, run)
    check_meter(stack, run, events)
    check_receipt(stack, client, run, rows, end)
    if not fenced:
        check_record(stack, run, rows)
    follower.check(stack.control)
    return run


def check_work(run, events):
    """No run is executed twice, and none that succeeded lost a byte."""
    kinds = [e["type"] for e in events]
    assert kinds.count("worker.started") <= 1 and kinds.count("microvm.ready") <= 1, kinds
    if run["status"] == "succeeded":
        assert kinds.count("worker.started") == 1, kinds
        if "shell.started" in kinds:
            assert kinds.count("shell.started") == kinds.count("shell.exited") == 1, kinds
            assert output_of(events) == "begun\nended\n", output_of(events)
            assert run["output"] == "the last word", run["output"]


def check_record(stack, run, rows):
    """Every event that the host wrote down is on the timeline, byte for byte, and no other of its events is."""
    stored = {seq: data for seq, data, _ in rows}
    written = {}
    for path in pathlib.Path(stack.node.state_dir, "spool").iterdir():
        try:
            record = path.read_bytes()
        except FileNotFoundError:
            continue  # a run's that was taken away
        for found in re.finditer(rb'\{"run_id":"%s","seq":(\d+),' % run["id"].encode(), record):
            seq = int(found[1])
            written[seq] = record[found.start():found.start() + len(stored.get(seq, b"?"))]
    hosts = {seq for seq, data in stored.items() if json.loads(data)["source"] != "control"}
    assert set(written) == hosts, f"written on the host: {sorted(written)}, stored: {sorted(hosts)}"
    assert all(stored[seq] == data for seq, data in written.items()), "an event is not what its host wrote"


def check_ledger_rows(stack, run):
    rows = dict(stack.control.query("SELECT kind, count(*) FROM ledger WHERE run_id = %s GROUP BY kind", run["id"]))
    assert rows.get("reserve") == 1 and rows.get("charge") == 1 and rows.get("release", 0) <= 1 and len(rows) <= 3, rows
    charged = stack.control.query("SELECT -sum(balance_delta) FROM ledger WHERE run_id = %s", run["id"])[0][0]
    assert charged == run["cost_micros"], (charged, run["cost_micros"])


def check_meter(stack, run, events):
    """Every call is paid once: what the provider counted, what the timeline says and what was charged are one."""
    said = [e["data"] for e in events if e["type"] == "model.call"]
    tally = stack.provider.tally(run["id"])
    charged = run["cost"]["model_micros"]
    assert len({c["call"] for c in said}) == len(said), f"a call stands twice on the timeline: {said}"
    assert len({(c.call, c.attempt) for c in tally}) == len(tally), f"a call was made twice: {tally}"
    assert len(said) <= len({c.call for c in tally}), (said, tally)
    told = sum(c["cost_micros"] for c in said)
    if run["status"] == "succeeded":
        assert len(said) == len(tally) == (2 if any(e["type"] == "shell.started" for e in events) else 1), (said, tally)
        assert [(c["input_tokens"], c["output_tokens"]) for c in said] == [(c.input, c.output) for c in tally], (said, tally)
        assert told == price(tally), (told, price(tally))
        assert told - len(said) < charged <= told, f"charged {charged}, the calls cost {told}"
    else:
        # Open holds of a broker that died, or of a host that was given up, are charged in full.
        known = run["error"]["code"] not in ("broker_lost", "node_restarted", "node_lost")
        assert told - len(said) <= charged and (charged <= told or not known), f"charged {charged}, the calls cost {told}"


def check_receipt(stack, client, run, rows, end):
    receipt = client.get(f"/v1/runs/{run['id']}/receipt")
    assert receipt["last_seq"] == rows[-1][0] and receipt["last_hash"] == rows[-1][2].hex()
    if receipt["node"] is None:
        # Nobody can sign for a VM whose broker died, whose host was restarted or given up, or that never started.
        assert end in FENCED or end not in {GOOD, LOST["vmm"], LOST["channel"]}, "an end that its host reported has no receipt"
        return
    seq, _, digest = rows[receipt["host_last_seq"] - 1]
    assert seq == receipt["host_last_seq"] and digest.hex() == receipt["host_last_hash"]
    message = b"".join([text("ephemeral/receipt/1"), text(run["id"]), struct.pack("<I", receipt["attempt"]), bytes.fromhex(receipt["request_sha256"]),
                        bytes.fromhex(receipt["image_sha256"]), text(receipt["isolation"]), struct.pack("<Q", receipt["host_last_seq"]), digest,
                        *(struct.pack("<q", receipt["usage"][name]) for name in USAGE)])
    node = {name: bytes.fromhex(value) for name, value in receipt["node"].items() if name in ("signature", "receipt_key")}
    signed = hashlib.sha256(message).digest()
    assert SODIUM.crypto_sign_verify_detached(node["signature"], signed, ctypes.c_ulonglong(len(signed)), node["receipt_key"]) == 0, "the receipt's signature is false"


def text(value):
    return struct.pack("<I", len(value)) + value.encode()


def check_fresh(scene):
    """The next run on the stack succeeds, in a machine that knows nothing of any before it."""
    before = scene.stack.boot_ids
    run_id = scene.client.create(prompt=turns(shell("ls -A . /tmp; touch left-behind /tmp/left-behind"), say("fresh")))["id"]
    run = scene.client.settled(run_id, 120)
    events = scene.client.events(run_id)
    assert run["status"] == "succeeded", f"the next run: {run['error']}"
    check_timeline(run, events)
    boot_id = next(e["data"]["boot_id"] for e in events if e["type"] == "worker.started")
    assert boot_id not in before and "left-behind" not in output_of(events), f"the next run is not in a fresh machine: {output_of(events)!r}"
    before.add(boot_id)
