"""The cap in booted runs: what the provider would bill by its own count, plus compute and fee, is never above a run's cap, and is what was
charged where the provider was honest and nothing broke off. In most runs the cap is what ends or shortens them."""
import collections
import os
import random
import re
import threading

import pytest
from client import check_timeline, say, shell, turns

RUNS, CLIENTS = int(os.environ.get("EPHEMERAL_MONEY_RUNS", "64")), 4
INPUT, CACHED, OUTPUT, PERCENT, FEE, COMPUTE = 3_000_000, 300_000, 15_000_000, 500, 300, 400_000
MOST_OUTPUT = 2000
TALLY = re.compile(r'scripted tally request="(run_[0-9a-f]+)-(\d+)-(\d+)" status=(\d+) input_tokens=(\d+) output_tokens=(\d+) limit=(\d+)')
Answer = collections.namedtuple("Answer", "call attempt status input output limit")


def tallies(control):
    """run id -> what the provider noted of each of its answers."""
    found = collections.defaultdict(list)
    for run, *numbers in TALLY.findall(control.log_text()):
        found[run].append(Answer(*map(int, numbers)))
    return found


def up(number, by):
    return -(-number // by)


def model_micros(answers):
    tokens = sum(a.input for a in answers) * INPUT + sum(a.output for a in answers) * OUTPUT
    return up(tokens * (10_000 + PERCENT), 10**10)


def work(dice):
    """Turns of one run: what kind of provider it meets, and what it does. Each says whether it is honest (its usage is its count)."""
    busy = {"status": 429, "attempts": [1], "headers": {"Retry-After": "0"}, "body": {"error": {"message": "busy"}}}
    steps = [shell(f"seq 1 {dice.randrange(20, 400)}") for _ in range(dice.randrange(2, 6))]
    kind = dice.choice(("plain", "plain", "plain", "busy", "cut", "silent", "liar"))
    if kind == "busy":
        steps[1]["http"] = busy
    if kind == "cut":
        steps[1]["cut_after_bytes"] = dice.randrange(100, 900)
    if kind == "silent":
        steps[0]["usage"] = None
    if kind == "liar":
        steps[0]["usage"] = dice.choice(({"prompt_tokens": 10**12, "completion_tokens": 5}, {"prompt_tokens": -1, "completion_tokens": 5},
                                         {"prompt_tokens": "1", "completion_tokens": 5}, {"prompt_tokens": 2**63, "completion_tokens": 5}))
    return kind, turns(*steps, say("word " * dice.randrange(1, 200)), note="n" * dice.randrange(1, 800))


def started(client, **fields):
    """A run to its end. One whose VM did not start in time (a host that is too busy) costs nothing and is made again."""
    for _ in range(6):
        run = client.settled(client.create(**fields)["id"], 300)
        if not run["error"] or run["error"]["code"] not in ("vm_start_failed", "no_capacity"):
            return run
        assert run["cost_micros"] == 0
    raise AssertionError(f"six VMs did not start: {run['error']}")


def judge(run, receipt, answers, kind):
    """Returns whether the cap bound."""
    assert len({(a.call, a.attempt) for a in answers}) == len(answers), "an attempt was answered twice"
    cap, cost = run["max_cost_micros"], run["cost"]
    bill = model_micros([a for a in answers if a.status == 200])
    assert bill + cost["compute_micros"] + cost["run_fee_micros"] <= cap, (run["id"], kind, bill, cost, cap)
    assert run["cost_micros"] <= cap
    unmetered = receipt["usage"]["unmetered_model_micros"]
    if unmetered == 0:
        assert cost["model_micros"] == bill, (run["id"], kind, cost, bill, answers)
    else:
        assert kind in ("cut", "silent", "liar") and cost["model_micros"] >= bill, (run["id"], kind)
    ended_by_cap = bool(run["error"]) and run["error"]["code"] == "budget_exceeded"
    return ended_by_cap or any(a.limit < MOST_OUTPUT for a in answers)


@pytest.mark.guest
@pytest.mark.timeout(1500)
def test_the_providers_own_tally(make_stack):
    stack = make_stack(node={"max_vms": 4, "max_concurrent_boots": 2, "memory_mib": 4096, "vcpus": 8})
    control = stack.control
    control.operator("PUT", "/models/scripted/dear", json={"upstream": "auto", "max_output_tokens": MOST_OUTPUT})
    control.operator("PUT", "/prices/scripted/dear", json={"input_micros_per_million": INPUT, "cached_input_micros_per_million": CACHED,
                                                           "output_micros_per_million": OUTPUT, "model_percent_hundredths": PERCENT})
    control.set_prices(compute_micros_per_million_ms=COMPUTE, run_fee_micros=FEE)
    done, failures, lock = [], [], threading.Lock()

    def drive(client, numbers):
        for number in numbers:
            dice = random.Random(number)
            kind, prompt = work(dice)
            try:
                run = started(client, prompt=prompt, model="scripted/dear", max_cost_micros=dice.randrange(34_000, 62_000))
                check_timeline(run, client.events(run["id"]))
                with lock:
                    done.append((run, client.get(f"/v1/runs/{run['id']}/receipt"), kind))
            except Exception as error:  # noqa: BLE001 - every kind of failure is reported below
                failures.append(repr(error)[:800])

    threads = [threading.Thread(target=drive, args=(stack.client(), range(n, RUNS, CLIENTS)), daemon=True) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1400)
    assert not failures, failures
    assert len(done) == RUNS
    noted, bound, charged, kinds = tallies(control), 0, 0, collections.Counter()
    for run, receipt, kind in done:
        bound += judge(run, receipt, noted[run["id"]], kind)
        charged += run["cost_micros"]
        kinds[kind, run["error"]["code"] if run["error"] else "succeeded"] += 1
    print(f"{RUNS} runs, the cap bound in {bound}, {charged} micros charged; {dict(kinds)}")
    assert bound * 64 >= RUNS * 50
    assert {run["status"] for run, _, _ in done} >= {"failed", "succeeded"}
    stack.node.clean()
    control.check_ledger()
