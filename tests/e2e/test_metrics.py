"""Metrics of both daemons: what they look like, that they move as things are caused, and that the deployment's alert rules fire in a real
Prometheus because the condition was caused."""
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import control as control_rig
import node as node_rig
import openmetrics
import pg
import pytest
import requests
import vmm_rig
import wait
from client import say, shell, turns
from openmetrics import Scrape
from prometheus import Prometheus
from room import Room

TOP = pathlib.Path(__file__).resolve().parents[2]
PAGE = TOP / "deploy" / "prometheus" / "metrics.md"
IDS = re.compile(r"\b(run|node|vm|org|key|member|mem|req)_[0-9a-f]{8}|[0-9a-f]{16}|\d+\.\d+\.\d+\.\d+|/")


def page_rows(families):
    """The lines of the page for what a daemon serves."""
    rows = []
    for family in families.values():
        names = {"counter": "_total", "info": "_info"}.get(family.type, "")
        used = {}
        for _, of in family.samples:
            for label, value in of:
                if label != "le":
                    used.setdefault(label, []).append(value)
        of = []
        for label, values in sorted(used.items()):
            values = list(dict.fromkeys(values))
            of.append(f"`{label}`" if family.type == "info" else f"`{label}`: {', '.join(values)}")
        text = family.help.replace('\\"', '"').replace("|", "\\|")
        rows.append(f"| `{family.name}{names}` | {family.type} | {'; '.join(of)} | {text} |")
    return rows


def check_page(title, families):
    """The page lists what is served, line by line; EPHEMERAL_UPDATE=1 writes it anew."""
    head = f"## {title}\n\n| name | type | labels | what |\n|---|---|---|---|\n"
    wanted = head + "\n".join(page_rows(families)) + "\n"
    text = PAGE.read_text()
    section = re.search(rf"## {title}\n.*?(?=\n## |\Z)", text, re.S)
    assert section, f"{PAGE} has no section {title}"
    if os.environ.get("EPHEMERAL_UPDATE") == "1":
        PAGE.write_text(text.replace(section[0], wanted))
    else:
        assert section[0].strip() == wanted.strip(), "the page of metrics is not what is served: EPHEMERAL_UPDATE=1 tests/run e2e -k metrics"


def check_labels(scrape):
    """Nothing in a label names a run, a node, an organization or an address; but the host says which image and VMM it has."""
    for name, of in scrape.samples:
        for label, value in of:
            assert name.endswith("_info") or label == "le" or not IDS.search(value), (name, label, value)
            assert len(value) <= 64 or label == "jail"


def is_plain(address):
    """What a scraper does not do: other methods, other paths; no key is asked for."""
    session = requests.Session()
    session.trust_env = False
    assert session.post(f"http://{address}/metrics", timeout=5).status_code == 405
    assert session.get(f"http://{address}/v1/runs", timeout=5).status_code == 404
    head = session.head(f"http://{address}/metrics", timeout=5)
    assert head.status_code == 200 and not head.content
    # By its preference, not by the order of what it would take.
    answer = session.get(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text;q=0.3, text/plain;q=0.7"}, timeout=5)
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4") and "# EOF" not in answer.text


def scraped(address, condition, what, seconds=30):
    """The first scrape for which condition(scrape) holds: keeper and database are some seconds behind."""
    def look():
        scrape = Scrape(address)
        return scrape if condition(scrape) else None
    return wait.until(look, seconds, what, every=0.2)


@pytest.mark.guest
def test_figures_follow_what_was_caused(make_stack):
    stack = make_stack(node={"max_vms": 2, "memory_mib": 2048})
    control, node = stack.control, stack.node
    at_control, at_node = control.addresses["metrics"], node.addresses["metrics"]
    before_control, before_node = Scrape(at_control), Scrape(at_node)
    client = stack.client()

    good = client.run(turns(shell("true"), say("done")))
    assert good["status"] == "succeeded", good["error"]
    client.call("GET", "/v1/runs/run_of_nobody", 404)
    # One whose broker is killed, while the host is looked at; one more than the organization's money allows.
    cut = client.create(prompt=turns(shell("sleep 100")))["id"]
    client.event(cut, "shell.started")
    # A broker tells what it counted once a second: what it had not told is lost with it.
    calls = {"kind": "model", "result": "ok"}
    told = before_node.get("ephemeral_node_calls_total", **calls) + 3
    busy = scraped(at_node, lambda s: s.get("ephemeral_node_vms", state="running") == 1 and s["ephemeral_node_vm_memory_bytes"] > 0 and
                   s.get("ephemeral_node_calls_total", **calls) == told, "a VM with memory, and its model calls")
    assert 50e6 < busy["ephemeral_node_vm_memory_bytes"] == busy["ephemeral_node_vm_memory_largest_bytes"] < 1e9
    assert busy["ephemeral_node_spool_bytes"] > 1e6 and busy.get("ephemeral_node_slots", state="taken") == 1
    assert busy["ephemeral_node_lease_left_seconds"] > 10 and busy.get("ephemeral_node_controlds", state="ready") == 1
    scraped(at_control, lambda s: s.get("ephemeral_runs", state="running") == 1 and s.get("ephemeral_nodes", state="live") == 1, "a run that runs")
    [broker] = node.role_pids("broker")
    os.kill(broker, signal.SIGKILL)
    assert client.settled(cut)["error"]["code"] == "broker_lost"
    poor = stack.client(credit=1000)
    poor.create(expect=402, prompt="too dear")

    after = scraped(at_node, lambda s: s["ephemeral_node_destroy_seconds_count"] == before_node["ephemeral_node_destroy_seconds_count"] + 2 and
                    s["ephemeral_node_spool_bytes"] == 0 == s["ephemeral_node_runs_held"], "the ends on the host")

    def grew(name, **of):
        return after.get(name, **of) - before_node.get(name, **of)

    assert grew("ephemeral_node_starts_total", mode="cold", result="ok") == 2 == grew("ephemeral_node_start_seconds_count", mode="cold")
    assert grew("ephemeral_node_calls_total", **calls) == 3
    assert grew("ephemeral_node_vm_cpu_seconds_total") > 0.5
    assert grew("ephemeral_node_link_requests_total", type="start", result="ok") == 2 == grew("ephemeral_node_link_requests_total", type="finish", result="ok")
    assert grew("ephemeral_node_starts_total", mode="cold", result="failed") == 0 == grew("ephemeral_node_refusals_total", reason="memory")
    assert after["ephemeral_node_vm_memory_bytes"] == 0 == after["ephemeral_node_events_unacknowledged"]
    assert all(after.get("ephemeral_node_vms", state=state) == 0 for state in ("starting", "running", "ending"))

    end = scraped(at_control, lambda s: s["ephemeral_settle_seconds_count"] == before_control["ephemeral_settle_seconds_count"] + 2 and
                  s.get("ephemeral_runs", state="running") == 0, "the ends at the control plane")

    def control_grew(name, **of):
        return end.get(name, **of) - before_control.get(name, **of)

    assert control_grew("ephemeral_runs_ended_total", status="succeeded") == 1 == control_grew("ephemeral_runs_ended_total", status="interrupted")
    assert control_grew("ephemeral_run_errors_total", code="broker_lost") == 1
    assert control_grew("ephemeral_start_seconds_count", mode="cold") == 2 <= control_grew("ephemeral_claim_seconds_count")  # a refused one is claimed again
    assert control_grew("ephemeral_creates_total", result="created") == 2
    assert control_grew("ephemeral_creates_total", result="no_money") == 1
    assert control_grew("ephemeral_charged_micros_total") == sum(client.read(run)["cost_micros"] for run in (good["id"], cut))
    assert control_grew("ephemeral_http_requests_total", **{"class": "create", "code": "4xx"}) == 1
    assert control_grew("ephemeral_http_requests_total", **{"class": "run", "code": "4xx"}) >= 1
    assert control_grew("ephemeral_runs_uncounted_total") == 0 == end["ephemeral_queue_oldest_seconds"]

    for address, scrape, title, old in ((at_control, end, "controld", before_control), (at_node, after, "noded", before_node)):
        assert openmetrics.promtool(address) == ""
        check_labels(scrape)
        check_page(title, scrape.families)
        is_plain(address)
        # Label values do not grow with what happens.
        assert set(scrape.samples) == set(old.samples) and len(scrape.samples) < 1000

    # Its link killed: another serves the same address.
    [link] = node.role_pids("link")
    os.kill(link, signal.SIGKILL)
    scraped(at_node, lambda s: s["ephemeral_node_link_restarts_total"] == 1 and s.get("ephemeral_node_controlds", state="ready") == 1, "another link")


@pytest.mark.guest
def test_a_start_from_a_warm_vm_is_counted_as_one(make_stack):
    stack = make_stack(node={"max_vms": 2, "warm_min": 1})
    at = stack.node.addresses["metrics"]
    ready = scraped(at, lambda s: s.get("ephemeral_node_pool_vms", state="ready") == 1, "a warm VM", 90)
    assert ready.get("ephemeral_node_vms", state="warm") == 1 == ready.get("ephemeral_node_pool_vms", state="target")
    assert stack.client().run(turns(say("done")))["status"] == "succeeded"
    taken = scraped(at, lambda s: s.get("ephemeral_node_starts_total", mode="warm", result="ok") == 1, "the start")
    assert taken.get("ephemeral_node_warm_vms_total", end="taken") == 1 == taken.get("ephemeral_node_start_seconds_count", mode="warm")
    assert taken.get("ephemeral_node_start_seconds_count", mode="cold") == 0
    scraped(stack.control.addresses["metrics"], lambda s: s.get("ephemeral_start_seconds_count", mode="warm") == 1, "the start at the control plane")


@pytest.mark.parametrize("text", [
    "", "# EOF", "# TYPE a counter\n# HELP a b\na_total 1\n", "# TYPE a counter\n# HELP a b\na 1\n# EOF\n", "a 1\n# EOF\n",
    "# HELP a b\n# TYPE a gauge\na 1\na 2\n# EOF\n", '# HELP a b\n# TYPE a gauge\na{x="1",x="2"} 1\n# EOF\n', "# HELP a b\n# TYPE a gauge\na{} 1\n# EOF\n",
    "# HELP a b\n# TYPE a gauge\na 1\n# HELP b b\n# TYPE b gauge\nb 1\n# HELP a b\n# EOF\n", "# HELP a b\n# TYPE a gauge\na one\n# EOF\n",
    "# HELP a b\n# TYPE a gauge\n# UNIT a seconds\na 1\n# EOF\n", "# HELP a b\n# TYPE a counter\na_total -1\n# EOF\n", "# TYPE a gauge\na 1\n# EOF\n",
    '# HELP a b\n# TYPE a gauge\na{x="a\\t"} 1\n# EOF\n', "# HELP a b\n# TYPE a gauge\n\na 1\n# EOF\n", "# HELP a b\n# TYPE a gauge\na 1 \n# EOF\n",
    '# HELP a b\n# TYPE a histogram\na_bucket{le="1.0"} 2\na_bucket{le="+Inf"} 1\na_sum 1\na_count 1\n# EOF\n',
    '# HELP a b\n# TYPE a histogram\na_bucket{le="1.0"} 1\na_sum 1\na_count 1\n# EOF\n', "# HELP a b\n# TYPE a gauge\na 1\n# EOF\n\n",
    '# HELP a b\n# TYPE a histogram\na_bucket{le="1"} 1\na_bucket{le="+Inf"} 1\na_sum 1\na_count 1\n# EOF\n'])
def test_the_strict_reader_is_strict(text):
    with pytest.raises(ValueError):
        openmetrics.parse(text)


def test_a_scrape_without_postgres(bin_dir):
    """It is answered at once, with the figures that were there and a word that they are old."""
    with pg.Cluster(fsync=False) as cluster, control_rig.Control(cluster, bin_dir) as control:
        at = control.addresses["metrics"]
        good = scraped(at, lambda s: s["ephemeral_database_up"] == 1, "the first figures")
        assert good["ephemeral_schema_version"] > 10 and 0 <= good["ephemeral_database_figures_age_seconds"] < 10
        assert all(good.get("ephemeral_database_connected", **{"class": name}) == 1 for name in ("events", "money", "reads", "listen"))
        cluster.stop_server()
        gone = scraped(at, lambda s: s["ephemeral_database_up"] == 0, "the word that Postgres is gone")
        assert gone.get("ephemeral_database_connected", **{"class": "reads"}) == 0
        assert gone["ephemeral_schema_version"] == good["ephemeral_schema_version"]
        old = scraped(at, lambda s: s["ephemeral_database_figures_age_seconds"] > 5, "figures that grow old")
        assert old.get("ephemeral_nodes", state="live") == 0
        began = time.monotonic()
        for _ in range(20):
            Scrape(at)
        assert time.monotonic() - began < 5
        cluster.start_server()
        scraped(at, lambda s: s["ephemeral_database_up"] == 1 and s["ephemeral_database_figures_age_seconds"] < 5, "figures again")


def test_refusals_have_their_reason(make_stack, image, tmp_path):
    """A full disk, then an image that was changed: the same run is refused for either, and counted by reason."""
    for name in ("vmlinux", "rootfs.sqfs"):
        (tmp_path / name).symlink_to(f"{image}/{name}")
    for name in ("image.json", "initramfs.cpio"):
        shutil.copy(f"{image}/{name}", tmp_path)
    with contextlib.closing(Room(tmp_path / "state", "size=96m")) as room:
        stack = make_stack(node={"image_dir": tmp_path, "state_dir": room.path})
        at = stack.node.addresses["metrics"]
        assert Scrape(at).get("ephemeral_node_disk_bytes", state="size") == 96 << 20

        def refused(reason):
            return lambda s: s.get("ephemeral_node_refusals_total", reason=reason) > 0

        room.fill(leave=1 << 20)
        client = stack.client()
        run = client.create(prompt="never started")["id"]
        scraped(at, refused("disk"), "a refusal for the disk")
        room.empty()
        os.utime(tmp_path / "initramfs.cpio")
        end = scraped(at, refused("image"), "a refusal for the image")
        client.cancel(run)
        others = [value for (name, of), value in end.samples.items() if name == "ephemeral_node_refusals_total" and of[0][1] not in ("disk", "image")]
        assert set(others) == {0} and end.get("ephemeral_node_starts_total", mode="cold", result="ok") == 0
        scraped(stack.control.addresses["metrics"], lambda s: s.get("ephemeral_requeues_total", reason="no_room") >= 2, "the control plane's count")
        stack.node.stop()


def broken(binary):
    """From now on this VMM is none."""
    fresh = binary.with_suffix(".new")
    shutil.copy("/bin/false", fresh)
    fresh.replace(binary)


@pytest.mark.guest
def test_alerts_fire_because_the_condition_was_caused(cluster, bin_dir, image, tmp_path):
    """One controld and three hosts, scraped by Prometheus: hosts are killed, drained, their VMM broken, something left in their directories."""
    program, its_own = vmm_rig.own_program(tmp_path)
    with contextlib.ExitStack() as cleanup:
        control = cleanup.enter_context(control_rig.Control(cluster, bin_dir, lease_seconds=6, lease_renew_seconds=1, lease_grace_seconds=1))
        nodes = [node_rig.Node(control, bin_dir, image, **config) for config in ({}, {}, its_own)]
        for node in nodes:
            cleanup.callback(node.close)
            node.start()
        idle, killed, bad = nodes
        at = {node: node.addresses["metrics"] for node in nodes}
        prometheus = cleanup.enter_context(Prometheus(
            {"ephemeral-controld": [control.addresses["metrics"]], "ephemeral-noded": at.values()},
            changes=[("ephemeral_queue_oldest_seconds) > 120", "ephemeral_queue_oldest_seconds) > 3")]))

        def fires(*alerts, seconds=45):
            wait.until(lambda: set(alerts) <= prometheus.firing(), seconds, f"{alerts} among {prometheus.firing()}", every=0.3)

        wait.until(lambda: list(prometheus.targets_up().values()) == ["up"] * 4, 30, "every target to be scraped", every=0.3)
        emulated = {("Emulated", at[node]) for node in nodes}
        assert prometheus.firing() <= emulated, "something is wrong before anything was done"

        # No host takes runs: one is killed, the others are drained.
        killed.stop(signal.SIGKILL)
        for node in (idle, bad):
            control.drain(node.name)
        client = control.new_client()
        waiting = client.create(prompt=turns(say("at last")))["id"]
        fires(("NodedDown", at[killed]), ("NodeLost", ""), ("QueueStuck", ""), ("NoCapacity", ""))
        assert emulated - {("Emulated", at[killed])} <= prometheus.firing()
        # One takes them again: the queue's alerts end, the others do not.
        control.undrain(idle.name)
        assert client.settled(waiting, 180)["status"] == "succeeded"
        wait.until(lambda: not {("QueueStuck", ""), ("NoCapacity", "")} & prometheus.firing(), 30, "the queue's alerts to end", every=0.3)
        assert {("NodedDown", at[killed]), ("NodeLost", "")} <= prometheus.firing()

        # Only one whose VMM is none takes them.
        control.drain(idle.name)
        broken(program)
        control.undrain(bad.name)
        for _ in range(3):
            client.create(prompt=turns(say("never said")))
        fires(("StartsFailing", at[bad]), ("NodeProbation", ""))

        # What a noded finds at its start that belongs to no VM; its address stays the same.
        idle.stop()
        idle.write_config(metrics_listen=at[idle])
        (pathlib.Path(idle.run_dir) / "vm" / f"vm_{'ab' * 16}" / "vmm").mkdir(parents=True)
        idle.start()
        fires(("LeftoversFound", at[idle]))


def test_alert_rules():
    """promtool: the rules are well formed, do what their own tests say, and those tests notice a rule that changed."""
    folder = TOP / "deploy" / "prometheus"

    def promtool(*words, cwd=folder):
        return subprocess.run(["promtool", *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)

    assert promtool("check", "rules", "rules.yml").returncode == 0
    assert promtool("check", "config", "prometheus.yml").returncode == 0
    done = promtool("test", "rules", "rules-test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("old,new", [("> 120", "> 1200"), ('state="lost"', 'state="live"'), ("[5m])) > 1", "[5m])) > 9"), ("< 0.05", "< 0.01")])
def test_tests_of_the_rules_notice(tmp_path, old, new):
    folder = TOP / "deploy" / "prometheus"
    shutil.copy(folder / "rules-test.yml", tmp_path)
    text = (folder / "rules.yml").read_text()
    assert old in text
    (tmp_path / "rules.yml").write_text(text.replace(old, new))
    assert subprocess.run(["promtool", "test", "rules", "rules-test.yml"], cwd=tmp_path, capture_output=True, timeout=60, check=False).returncode == 1


def test_prometheus_finds_nodes(make_stack):
    """http_sd: nodes with a label `metrics`, through as many pages as there are; revoked ones and those without it are not listed."""
    control = make_stack(node=False).control
    control.query("INSERT INTO nodes (id, name, labels, isolation, state, sign_key, seal_key, receipt_key, seal_sig, receipt_sig, created_at_ms) "
                  "SELECT 'node_' || md5(i::text), 'host' || i, CASE mod(i, 3) WHEN 0 THEN 'disk=fast,metrics=10.0.0.1:' || i WHEN 1 THEN 'xmetrics=a,disk=fast' "
                  "ELSE '' END, 'kvm', CASE WHEN i = 300 THEN 'revoked' ELSE 'active' END, sha256(i::text::bytea), sha256('s'), sha256('r'), 'a', 'b', 1 "
                  "FROM generate_series(1, 300) i")
    control.query("INSERT INTO nodes_live (node_id) SELECT id FROM nodes")
    found = control.operator("GET", "/http_sd")
    assert sorted(found, key=lambda t: int(t["targets"][0].split(":")[1])) == [
        {"targets": [f"10.0.0.1:{i}"], "labels": {"node": f"host{i}", "isolation": "kvm"}} for i in range(3, 300, 3)]
    scrape = scraped(control.addresses["metrics"], lambda s: s.get("ephemeral_nodes", state="unseen") > 0, "nodes that never asked for work")
    assert scrape.get("ephemeral_nodes", state="unseen") == 299 and scrape.get("ephemeral_nodes", state="live") == 0


def test_alerts_are_written_down():
    """Each alert has its line in the README, and no line is of one that is gone."""
    folder = TOP / "deploy" / "prometheus"
    alerts = re.findall(r"alert: Ephemeral(\w+)", (folder / "rules.yml").read_text())
    assert sorted(alerts) == sorted(re.findall(r"^\| `(\w+)` \|", (folder / "README.md").read_text(), re.M))
