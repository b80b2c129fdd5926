"""Two controlds and three hosts, each in a network of its own: runs spread; a host that is cut off, slow, restarted or an hour wrong, a controld
that dies and a Postgres that restarts cost no run more than they must. After each, the ledger is proven and every host is clean."""
import json
import os
import signal

import pytest
import wait
from client import output_of, say, shell, turns
from fleet import Fleet
from proxy import Proxy

pytestmark = [pytest.mark.xdist_group("many_hosts"), pytest.mark.guest, pytest.mark.timeout(400)]

LEASE = {"lease_seconds": 12, "lease_renew_seconds": 1, "lease_grace_seconds": 1}
NODE = {"max_vms": 2, "max_concurrent_boots": 2, "boot_timeout_ms": 90_000}


@pytest.fixture(scope="module")
def made(bin_dir, image):
    with Fleet(bin_dir, image, 3, 2, LEASE, NODE) as fleet:
        yield fleet


@pytest.fixture
def fleet(made):
    """With an open provider, every host taking runs; and afterwards nothing left anywhere."""
    made.provider.gate.clear()
    yield made
    made.provider.gate.set()
    made.only(*made.nodes)
    made.clean()


def waiting(client, count):
    """Runs that said something, and then wait for a model that does not answer before the gate is open."""
    ids = [client.create(prompt=turns(shell(f"echo number {n}"), say(f"the end of {n}", gate=True)))["id"] for n in range(count)]
    for run_id in ids:
        client.event(run_id, "shell.exited", 120)
    return ids


def all_good(fleet, client, ids):
    runs = fleet.settled(client, ids)
    assert {run["status"] for run in runs.values()} == {"succeeded"}, [(r["id"], r["status"], r["error"]) for r in runs.values()]
    assert sorted(run["output"] for run in runs.values()) == sorted(f"the end of {n}" for n in range(len(ids)))


def logged(node, text):
    return text in node.log.read_text(errors="replace")


def test_runs_spread(fleet):
    """As many as there is room for are everywhere at once, one more waits."""
    client = fleet.client()
    ids = waiting(client, 6)
    assert set(fleet.spread(ids).values()) == {2} and len(fleet.spread(ids)) == 3, fleet.spread(ids)
    late = client.create(prompt=turns(say("the end of 6")))["id"]
    assert "run.claimed" not in [e["type"] for e in client.events(late)]
    fleet.provider.gate.set()
    all_good(fleet, client, [*ids, late])


def test_a_host_is_cut_off_for_longer_than_its_lease(fleet):
    """Its VMs die where they are, in time; its runs are given up once; what it says when it is back counts for nothing."""
    client = fleet.client()
    ids = waiting(client, 6)
    where = fleet.where(ids)
    lost, wire = fleet.nodes[1], fleet.wires[1]
    theirs = [run_id for run_id in ids if where[run_id] is lost]
    assert len(theirs) == 2
    wire.cut()
    try:
        wait.until(lambda: not lost.role_pids("vmm"), LEASE["lease_seconds"] + 15, "the VMs to be dead at the end of their lease")
        runs = fleet.settled(client, theirs, 60, fenced=True)
        assert {(r["status"], r["error"]["code"]) for r in runs.values()} == {("interrupted", "node_lost")}, runs
        before = {run_id: fleet.serving.event_rows(run_id) for run_id in theirs}
        assert not fleet.serving.node_live(lost.name)
        fleet.provider.gate.set()
        others = fleet.settled(client, [run_id for run_id in ids if run_id not in theirs])
        assert {run["status"] for run in others.values()} == {"succeeded"}
    finally:
        wire.mend()
    wait.until(lambda: fleet.serving.node_live(lost.name), 60, "the host to be back")
    lost.clean(60)
    for run_id in theirs:
        wait.until(lambda r=run_id: logged(lost, f"orders a kill run={r}") or logged(lost, f"run is fenced run={r}"), 30, "the host to hear that its run is fenced")
        assert fleet.serving.event_rows(run_id) == before[run_id], "a fenced report changed the timeline"
        now = client.read(run_id)
        assert all(now[key] == runs[run_id][key] for key in ("status", "cost_micros", "released_micros", "error"))
        fleet.check(now, fenced=True)
    fleet.only(lost)
    all_good(fleet, client, [client.create(prompt=turns(say("the end of 0")))["id"]])


def test_a_slow_host(fleet):
    """Every word between it and the controlds is a third of a second late, each way: runs take longer, and nothing else."""
    node, client = fleet.nodes[2], fleet.client()
    proxies = [Proxy(link.rpartition("//")[2], fleet.network.address, late=0.3) for link in fleet.links()]
    try:
        assert node.stop(signal.SIGINT) == 0
        node.write_config(controld=",".join(f"tls+tcp://{p.address}" for p in proxies))
        node.start()
        fleet.only(node)
        fleet.provider.gate.set()
        ids = [client.create(prompt=turns(shell("for i in 1 2 3 4 5; do echo $i; sleep 0.2; done"), say(f"the end of {n}")))["id"] for n in range(2)]
        all_good(fleet, client, ids)
        assert {output_of(client.events(run_id)) for run_id in ids} == {"1\n2\n3\n4\n5\n"}
        assert set(fleet.spread(ids)) == {node.name} and sum(p.passed for p in proxies) > 10_000
        node.clean()
    finally:
        node.stop(signal.SIGINT)
        for proxy in proxies:
            proxy.close()
        node.write_config(controld=None)
        node.start()


def test_a_host_is_killed_and_started(fleet):
    """noded dies, its VMs do not: the next one adopts them, and their runs end as if nothing had been."""
    client = fleet.client()
    ids = waiting(client, 6)
    node = fleet.nodes[0]
    theirs = [run_id for run_id, where in fleet.where(ids).items() if where is node]
    vms = node.role_pids("vmm")
    assert len(theirs) == len(vms) == 2
    node.stop(signal.SIGKILL)
    node.start()
    assert node.role_pids("vmm") == vms, "the VMs did not outlive their noded"
    fleet.provider.gate.set()
    all_good(fleet, client, ids)


def test_a_clock_that_is_an_hour_wrong(fleet, tmp_path):
    """A host's wall clock is ahead, then behind: times of runs are right, for they are measured, and money is; also where noded has to
    report for a broker that died."""
    node, client = fleet.nodes[1], fleet.client()
    clock = tmp_path / "clock"
    fleet.provider.gate.set()
    fleet.only(node)
    try:
        for offset in (3600_000, -3600_000):
            assert node.stop(signal.SIGINT) == 0
            clock.write_text(f"{offset} 0\n")
            clock.chmod(0o444)
            node.env = {"EPHEMERAL_CLOCK_FILE": str(clock)}
            node.start()
            good = client.settled(client.create(prompt=turns(shell("sleep 1"), say("the end of 0")))["id"], 120)
            lost = client.create(prompt=turns(shell("echo here; sleep 100"), say("never said")))["id"]
            client.event(lost, "shell.output", 120)
            for pid in node.role_pids("broker"):
                os.kill(pid, signal.SIGKILL)
            lost = client.settled(lost, 120)
            assert good["status"] == "succeeded" and lost["error"]["code"] == "broker_lost", (good["error"], lost["error"])
            for run in (good, lost):
                events = fleet.check(run)
                assert all(0 <= e["t"] < 120 for e in events), [(e["type"], e["t"]) for e in events]
                assert run["cost"]["compute_micros"] < 120 * 1000 * 200_000 // 1_000_000
            node.clean()
    finally:
        node.stop(signal.SIGINT)
        node.env = {}
        node.start()


def test_a_controld_dies(fleet):
    """The one that clients and hosts speak to: the other goes on with every run, and takes new ones."""
    client = fleet.client()
    ids = waiting(client, 5)
    first, second = fleet.controls
    first.stop(signal.SIGKILL)
    try:
        fleet.serve_from(second, client)
        ids.append(client.create(prompt=turns(say("the end of 5", gate=True)))["id"])
        client.event(ids[-1], "worker.started", 120)
        fleet.provider.gate.set()
        all_good(fleet, client, ids)
    finally:
        first.start()
        first.until_ready()
        fleet.serve_from(first, client)


def test_postgres_restarts(fleet):
    """It is shot while six runs are on three hosts: all of them end well, and none of their events is missing."""
    client = fleet.client()
    ids = waiting(client, 6)
    fleet.cluster.stop_server(signal.SIGQUIT)
    fleet.provider.gate.set()
    fleet.cluster.start_server()
    for control in fleet.controls:
        control.until_ready(60)
    all_good(fleet, client, ids)
    for run_id in ids:
        assert [json.loads(data)["type"] for _, data, _ in fleet.serving.event_rows(run_id)].count("model.call") == 2
