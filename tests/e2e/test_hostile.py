"""Providers that misbehave, and wallets that many want at once: the right end and code, never more
than the cap, and nothing left on the host. One control plane and one node are shared; runs of a test go at once."""
import os
import random
import signal
import threading

import control as control_rig
import fixtures
import node as node_rig
import pytest
import wait
from client import check_chain, check_timeline, say, shell, turns

ERROR = {"error": {"message": "made to fail", "type": "server_error"}}


@pytest.fixture(scope="module")
def busy(cluster, bin_dir, image):
    control = control_rig.Control(cluster, bin_dir)
    made = fixtures.Stack(control, node_rig.Node(control, bin_dir, image, max_vms=4).start())
    control.operator("PUT", "/models/scripted/impatient", json={"call_timeout_ms": 1500, "upstream": "auto"})
    control.operator("PUT", "/prices/scripted/impatient", json={"input_micros_per_million": 50_000, "output_micros_per_million": 400_000})
    yield made
    made.close()


def all_at_once(stack, client, runs, seconds=150):
    """runs: name -> fields of a run. Creates all, then waits for and checks each; returns name -> (run, events)."""
    made = {name: client.create(**fields)["id"] for name, fields in runs.items()}
    found = {}
    for name, run_id in made.items():
        run = client.settled(run_id, seconds)
        events = client.events(run_id)
        check_timeline(run, events)
        check_chain(stack.control.event_rows(run_id))
        run["unmetered"] = client.get(f"/v1/runs/{run_id}/receipt")["usage"]["unmetered_model_micros"]
        found[name] = (run, events)
    stack.node.clean()
    stack.control.check_ledger()
    return found


def calls(events):
    return [e["data"] for e in events if e["type"] == "model.call"]


def ended(found, name, status, code=None):
    run, events = found[name]
    assert (run["status"], run["error"]["code"] if run["error"] else None) == (status, code), (name, run["status"], run["error"])
    return run, events


def http(status, attempts=None, body=None, **headers):
    answer = {"status": status, "body": ERROR if body is None else body}
    if attempts:
        answer["attempts"] = attempts
    if headers:
        answer["headers"] = {name.replace("_", "-"): value for name, value in headers.items()}
    return answer


@pytest.mark.guest
def test_providers_that_refuse(busy):
    wants = {"error": {"message": "Unsupported parameter: 'max_completion_tokens' is not supported with this model. Use 'max_tokens' instead.",
                       "type": "invalid_request_error", "param": "max_completion_tokens", "code": "unsupported_parameter"}}
    found = all_at_once(busy, busy.client(), {name: {"prompt": turns(*script), "shell": False} for name, script in {
        "limited": [say("after a pause", http=http(429, [1], Retry_After="1"))],
        "trouble": [say("after three", http=http(500, [1, 2, 3]))],
        "broken": [say("never said", http=http(500))],
        "renamed": [say("with the old name", http=http(400, [1], wants))],
        "garbage": [{"raw": "<html>no model here</html>"}],
        "half_json": [say("never said", stream=False, cut_after_bytes=60)],
        "then_good": [say("whole at last", http=http(200, [1], "data: {\"choices\":[{\"delta\":{\"content\":\"ha"))],
    }.items()})
    run, events = ended(found, "limited", "succeeded")
    assert run["output"] == "after a pause" and calls(events)[0]["attempts"] == 2 and calls(events)[0]["duration_ms"] >= 1000
    run, events = ended(found, "trouble", "succeeded")
    assert run["output"] == "after three" and calls(events)[0]["attempts"] == 4
    assert run["usage"]["model_calls"] == 1
    run, _ = ended(found, "broken", "failed", "model_error")
    assert "500" in run["error"]["message"] and run["cost"]["model_micros"] == 0
    run, _ = ended(found, "renamed", "succeeded")
    assert run["output"] == "with the old name"
    for name in ("garbage", "half_json"):
        run, _ = ended(found, name, "failed", "model_error")
        assert run["cost"]["model_micros"] > 0, f"{name}: a 2xx head is charged at the hold"
    run, _ = ended(found, "then_good", "succeeded")
    assert run["output"] == "whole at last" and run["unmetered"] > 0


@pytest.mark.guest
def test_providers_that_cheat(busy):
    """Streams that break off, usage that is missing or false, silence."""
    found = all_at_once(busy, busy.client(), {name: {"prompt": turns(*script), **fields} for name, (script, fields) in {
        "cut": ([say("x" * 2000, cut_after_bytes=700)], {"max_cost_micros": 200_000}),
        "no_usage": ([say("free?", usage=None)], {"max_cost_micros": 50_000}),
        "huge_usage": ([say("dear?", usage={"prompt_tokens": 10**15, "completion_tokens": 10**15, "total_tokens": 2 * 10**15})], {"max_cost_micros": 50_000}),
        "negative_usage": ([say("paid?", usage={"prompt_tokens": -5, "completion_tokens": -7})], {"max_cost_micros": 50_000}),
        "silent": ([say("never said", delay_ms=60_000)], {"timeout_seconds": 2}),
        "slow": ([say("never said", delay_ms=60_000)], {"model": "scripted/impatient"}),
        "drip": ([say("a word at a time " * 50, chunk_delay_ms=2000)], {"timeout_seconds": 3}),
    }.items()})
    run, _ = ended(found, "cut", "failed", "model_error")
    assert run["cost"]["model_micros"] == run["unmetered"] > 0
    for name in ("no_usage", "huge_usage", "negative_usage"):
        run, events = ended(found, name, "succeeded")
        assert run["cost"]["model_micros"] == run["unmetered"] == calls(events)[0]["cost_micros"] > 0, name
        assert run["cost_micros"] <= 50_000
        assert run["usage"]["total_tokens"] == 0, "a false count was shown as if it were true"
    for name in ("silent", "drip"):
        run, events = ended(found, name, "timed_out", "timed_out")
        started, destroyed = (next(e["t"] for e in events if e["type"] == kind) for kind in ("worker.started", "microvm.destroyed"))
        assert destroyed - started < run["timeout_seconds"] + 2
    run, events = ended(found, "slow", "failed", "model_error")
    assert "1500 ms" in run["error"]["message"]


@pytest.mark.guest
def test_replies_that_confuse(busy):
    def call(name, arguments):
        return {"name": name, "arguments": arguments}
    found = all_at_once(busy, busy.client(), {name: {"prompt": turns(*script)} for name, script in {
        "tools": [{"tool_calls": [call("rm_rf", {}), call("shell", "{\"command\": "), call("shell", {"command": 7}), call("shell", {}),
                                  call("shell", {"command": "echo no", "sudo": True}), call("shell", "[" * 3000 + "]" * 3000),
                                  call("shell", {"command": "echo one"}), call("shell", {"command": "echo two"})]},
                  say("\n".join(f"<{n}>{{{{tool:{n}}}}}" for n in range(1, 9)))],
        "same_ids": [{"tool_calls": [dict(call("shell", {"command": f"echo {n}"}), id="same") for n in (1, 2)]}, say("{{tool:1}}{{tool:2}}")],
        "cut_call": [{"tool_calls": [call("shell", "{\"command\": \"echo ha")], "finish_reason": "length"}, say("it said: {{tool:1}}")],
        "empty": [say("")],
        "unicode": [{"tool_calls": [call("shell", {"command": "printf 'caf\\303\\251 \\360\\237\\230\\200 \\000 \\377'"})]}, say("😀 {{tool:1}}")],
    }.items()})
    run, _ = ended(found, "tools", "succeeded")
    answers = [run["output"].split(f"<{n}>")[1].split(f"<{n + 1}>")[0] for n in range(1, 9)]
    assert all("Not done" in a for a in answers[:6]), answers
    assert "one" in answers[6] and "two" in answers[7]
    run, events = ended(found, "same_ids", "succeeded")
    ids = [e["data"]["call_id"] for e in events if e["type"] == "shell.started"]
    assert len(ids) == len(set(ids)) == 2, "two commands with one id"
    run, events = ended(found, "cut_call", "succeeded")
    assert "not complete" in run["output"] and not [e for e in events if e["type"] == "shell.started"]
    assert ended(found, "empty", "succeeded")[0]["output"] == ""
    run, _ = ended(found, "unicode", "succeeded")
    assert "café 😀" in run["output"]


def create_at_once(urls, key, caps):
    """Creates a run with each of these caps, 20 clients at once, in turn on each controld; returns [(status, body, cap)]."""
    answers, lock = [], threading.Lock()

    def post(number):
        one = control_rig.client_rig.Client(urls[number % len(urls)], key)
        for cap in caps[number::20]:
            answer = one.call("POST", "/v1/runs", json={"prompt": turns(say("x")), "max_cost_micros": cap})
            with lock:
                answers.append((answer.status_code, answer.json(), cap))
    threads = [threading.Thread(target=post, args=(n,)) for n in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert len(answers) == len(caps)
    assert all(body["type"].endswith("insufficient-balance") for status, body, _ in answers if status == 402)
    return answers


def test_a_wallet_for_ten(busy, cluster, bin_dir):
    """A hundred creates at once against credit for ten, on two controlds of one database: ten of one size, then a mix of sizes."""
    control = busy.control
    control.drain(busy.node.name)
    with control_rig.Control(cluster, bin_dir, conninfo=control.conninfo, scripted=False, keyring=control.home / "keyring",
                             tls_dir=control.home / "tls") as second:
        for caps in ([40_000] * 100, random.Random(7).choices((15_000, 40_000, 95_000), k=100)):
            credit = 10 * 40_000 + 39_999
            client = control.new_client(credit=credit)
            answers = create_at_once((control.url, second.url), client.key, caps)
            made = [(body, cap) for status, body, cap in answers if status == 201]
            refused = [cap for status, _, cap in answers if status == 402]
            reserved = sum(cap for _, cap in made)
            assert len(made) + len(refused) == 100
            assert reserved <= credit and credit - reserved < min(refused), "the last of the wallet was given to nobody"
            assert len(set(caps)) > 1 or len(made) == 10
            assert client.get("/v1/me")["reserved_micros"] == reserved
            for run, _ in made:
                client.cancel(run["id"])
            for run, _ in made:
                assert client.settled(run["id"], 30)["cost_micros"] == 0
            me = client.get("/v1/me")
            assert me["reserved_micros"] == 0 and me["balance_micros"] == credit
    control.undrain(busy.node.name)
    control.check_ledger()


@pytest.mark.guest
def test_broker_is_killed_in_a_model_call(busy):
    """kill -9 while the provider works: the open hold is charged in full, within the cap, and compute is booked as compute."""
    control, client = busy.control, busy.client()
    control.operator("PUT", "/models/scripted/dear", json={"upstream": "auto", "max_output_tokens": 1000, "call_timeout_ms": 20_000})
    control.operator("PUT", "/prices/scripted/dear", json={"input_micros_per_million": 3_000_000, "output_micros_per_million": 15_000_000})
    made = client.create(prompt=turns(say("never said", delay_ms=60_000)), model="scripted/dear", max_cost_micros=70_000)["id"]
    wait.until(lambda: f'scripted answer request="{made}-1-1"' in control.log_text(), 60, "the provider to be asked")
    before = client.read(made)
    for pid in busy.node.role_pids("broker"):
        os.kill(pid, signal.SIGKILL)
    run = client.settled(made, 60)
    check_timeline(run, client.events(made))
    assert run["status"] == "interrupted" and run["error"]["code"] == "broker_lost", run["error"]
    cost, usage = run["cost"], client.get(f"/v1/runs/{made}/receipt")["usage"]
    # At least the output limit, at most the cap; compute to the call's deadline at 0.2 micros a millisecond.
    assert 15_000 <= cost["model_micros"] <= run["cost_micros"] <= 70_000, cost
    assert usage["unmetered_model_micros"] == cost["model_micros"]
    assert 10_000 <= usage["compute_ms"] <= 120_000 and cost["compute_micros"] == -(-usage["compute_ms"] * 200_000 // 1_000_000), (cost, usage)
    assert before["status"] == "running"
    busy.node.clean()
    control.check_ledger()


@pytest.mark.guest
def test_caps_that_bind(busy):
    """Random tight caps: most runs end in the middle of what they do, none costs more than its cap."""
    dice = random.Random(20)
    work = turns(shell("seq 1 2000"), shell("seq 1 2000"), say("x" * 400, usage=None), note="n" * 2000)
    found = all_at_once(busy, busy.client(), {f"cap {n}": {"prompt": work, "max_cost_micros": dice.choice((1300, 1500, 1800, 2500, 4000)) + dice.randrange(300)}
                                             for n in range(10)}, 200)
    for name, (run, _) in found.items():
        assert run["cost_micros"] <= run["max_cost_micros"]
        assert run["status"] == "succeeded" or run["error"]["code"] == "budget_exceeded", (name, run["status"], run["error"])
    assert {run["status"] for run, _ in found.values()} >= {"failed"}
