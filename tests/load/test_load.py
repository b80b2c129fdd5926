"""60 runs by 8 clients on one node: each succeeds with its own nonce, the ledger is proven, nothing is left on the host."""
import secrets
import threading

import pytest
from client import check_timeline, output_of, say, shell, turns

RUNS, CLIENTS = 60, 8


@pytest.mark.guest
@pytest.mark.timeout(900)
def test_sixty_runs_by_eight_clients(make_stack):
    stack = make_stack(node={"max_vms": 8, "max_concurrent_boots": 2, "memory_mib": 8192, "vcpus": 16})
    clients = [stack.client() for _ in range(CLIENTS)]
    failures, done = [], []

    def drive(client, count):
        for _ in range(count):
            nonce = secrets.token_hex(16)
            try:
                run = client.run(turns(shell(f"echo {nonce} > nonce; cat nonce"), say("{{tool:1}}")), 600, timeout_seconds=120)
                events = client.events(run["id"])
                assert run["status"] == "succeeded", run["error"]
                assert nonce in run["output"] and nonce in output_of(events)
                check_timeline(run, events)
                done.append(run["id"])
            except Exception as error:  # noqa: BLE001 - every kind of failure is reported below
                failures.append(repr(error)[:500])

    shares = [RUNS // CLIENTS + (n < RUNS % CLIENTS) for n in range(CLIENTS)]
    threads = [threading.Thread(target=drive, args=(c, n)) for c, n in zip(clients, shares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(850)
    assert not failures, failures
    assert len(set(done)) == RUNS
    for client in clients:
        assert client.get("/v1/me")["reserved_micros"] == 0
    stack.node.clean()
    stack.control.check_ledger()
