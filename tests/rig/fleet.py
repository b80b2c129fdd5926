"""Several hosts and controlds as one service: each host a network namespace, all controlds on one Postgres, a model provider that no fault
touches. What e2e/test_many_hosts.py and the endurance tests play on."""
import collections
import json
import os
import signal

import control as control_rig
import node as node_rig
import pg
import wait
from client import ENDS, check_chain, check_timeline
from netns import Network
from provider import Provider


class Fleet:
    """Fleet(bin_dir, image, hosts, controlds, lease={...}, node={...}); `serving` is the controld that its clients speak to."""

    def __init__(self, bin_dir, image, hosts=3, controlds=2, lease=None, node=None, fsync=False):
        self.bin_dir, self.lease = bin_dir, lease or {}
        self.network = self.cluster = self.provider = None
        self.controls, self.nodes, self.wires = [], [], []
        try:
            self.network = Network()
            self.provider = Provider(self.network.address)
            self.cluster = pg.Cluster(fsync=fsync)
            self.cluster.start()
            for number in range(controlds):
                self.add_controld(number)
            first = self.controls[0]
            first.write_config(link_addresses=",".join(c.addresses["link"] for c in self.controls))
            first.stop()
            first.start()
            self.serving = first
            for number in range(hosts):
                self.add_host(number, image, node or {})
        except BaseException:
            self.abandon()
            raise

    def add_controld(self, number):
        more = {"link_listen": f"{self.network.address}:0", **self.lease}
        first = self.controls[0] if number else None
        if first:
            more.update(conninfo=first.conninfo, keyring=first.home / "keyring", tls_dir=first.home / "tls")
        made = control_rig.Control(self.cluster, self.bin_dir, scripted=False, **more)
        self.controls.append(made)
        made.keep_addresses()
        if first:
            made.operator_key = first.operator_key
        else:
            self.provider.serve_to(made)

    def add_host(self, number, image, config):
        wire = self.network.add()
        self.wires.append(wire)
        node = node_rig.Node(self.controls[0], self.bin_dir, image, f"host{number + 1}-{os.getpid()}", **config)
        node.prefix = wire.prefix
        self.nodes.append(node)
        node.start()

    def links(self):
        return ["tls+tcp://" + c.addresses["link"].rpartition("//")[2] for c in self.controls]

    # --- clients -------------------------------------------------------------------------------------------------------------------

    def client(self, **org):
        return self.serving.new_client(**org)

    def serve_from(self, control, *clients):
        """Clients speak to this controld from now on, and so do the hosts' rigs."""
        self.serving = control
        for client in clients:
            client.url = control.url
        for node in self.nodes:
            node.control = control

    # --- where runs are ------------------------------------------------------------------------------------------------------------

    def node_ids(self):
        """node id -> Node"""
        ids = {n["name"]: n["id"] for n in self.serving.operator("GET", "/nodes?limit=100")["data"]}
        return {ids[node.name]: node for node in self.nodes}

    def where(self, run_ids):
        """{run id: Node} of runs that a host has or had."""
        nodes = self.node_ids()
        rows = self.serving.query("SELECT r.run_id, coalesce(l.node_id, r.node_id) FROM runs r LEFT JOIN run_live l ON l.run_id = r.run_id WHERE r.run_id = ANY (%s)",
                                  list(run_ids))
        return {run: nodes[node] for run, node in rows if node in nodes}

    def spread(self, run_ids):
        """{host name: number of runs}"""
        return collections.Counter(node.name for node in self.where(run_ids).values())

    def only(self, *nodes):
        """New runs go to these alone."""
        for node in self.nodes:
            (self.serving.undrain if node in nodes else self.serving.drain)(node.name)

    # --- what holds ----------------------------------------------------------------------------------------------------------------

    def check(self, run, fenced=False):
        """What must hold of every settled run; returns its events."""
        rows = self.serving.event_rows(run["id"])
        events = [json.loads(data) for _, data, _ in rows]
        check_timeline(run, events, fenced=fenced)
        check_chain(rows)
        kinds = [e["type"] for e in events]
        assert len([k for k in kinds if k in ["run." + name for name in ENDS]]) == 1 and kinds.count("run.settled") == 1, kinds
        assert kinds.count("worker.started") <= 1 and kinds.count("microvm.ready") <= 1, kinds
        ledger = dict(self.serving.query("SELECT kind, count(*) FROM ledger WHERE run_id = %s GROUP BY kind", run["id"]))
        assert ledger.get("reserve") == 1 and ledger.get("charge") == 1 and ledger.get("release", 0) <= 1, ledger
        calls = self.provider.tally(run["id"])
        assert len({(c.call, c.attempt) for c in calls}) == len(calls), f"a call was made twice: {calls}"
        return events

    def settled(self, client, run_ids, seconds=180, fenced=False):
        """{run id: run}, each checked."""
        found = {run_id: client.settled(run_id, seconds) for run_id in run_ids}
        for run in found.values():
            self.check(run, fenced)
        return found

    def clean(self, seconds=60):
        for node in self.nodes:
            node.clean(seconds)
        assert self.serving.query("SELECT count(*) FROM run_live")[0][0] == 0, "a run that is no more has a row of a live one"
        self.serving.check_ledger()

    # --- the end -------------------------------------------------------------------------------------------------------------------

    def close(self):
        """To clean hosts; what the programs say at their end is checked."""
        try:
            self.clean()
            while self.nodes:
                self.nodes.pop().close()
            while self.controls:
                self.controls.pop().close()
        finally:
            self.abandon()

    def abandon(self):
        """Everything goes, in whatever state it is."""
        for made in (*self.nodes, *self.controls):
            made.stop(signal.SIGKILL)
        for node in self.nodes:
            wait.until(lambda n=node: not n.role_pids("vmm"), 60, "VMs to die with their host")
        if self.provider:
            self.provider.close()
        if self.cluster:
            self.cluster.stop()
        if self.network:
            self.network.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        if kind:
            self.abandon()
        else:
            self.close()
