"""What an operator changes while runs are there: an organization set from the command line, disabled with runs queued, hosts hidden."""
import subprocess

import wait
from api_rig import admin_cli, client, control, paper, problem  # noqa: F401
from client import check_chain, check_timeline
from paper_node import PaperNode

import control as control_rig


def test_org_set(control, admin_cli):
    org = control.new_org(allow_emulated=False)
    shown = admin_cli("org", "set", org, "--name", f"new {org}", "--allow-emulated", "yes", "--unlimited", "yes", "--default-model", "scripted/shell",
                      "--default-max-cost", "0.25", "--max-queued", "7", "--max-running", "3")
    assert f"new {org}" in shown and "unlimited" in shown and "emulated hosts allowed" in shown and "disabled" not in shown
    now = control.operator("GET", f"/orgs/{org}")
    assert {k: now[k] for k in ("name", "allow_emulated", "unlimited", "default_model", "default_max_cost_micros", "max_queued_runs", "max_running_runs",
                                "disabled")} == {"name": f"new {org}", "allow_emulated": True, "unlimited": True, "default_model": "scripted/shell",
                                                 "default_max_cost_micros": 250000, "max_queued_runs": 7, "max_running_runs": 3, "disabled": False}
    # What is not named stays; 0 and '' give the deployment's value back.
    assert "disabled" in admin_cli("org", "set", org, "--enabled", "no")
    admin_cli("org", "set", org, "--enabled", "yes", "--unlimited", "no", "--max-queued", "0", "--default-model", "")
    now = control.operator("GET", f"/orgs/{org}")
    assert not now["disabled"] and not now["unlimited"] and now["max_queued_runs"] is None and now["default_model"] is None and now["max_running_runs"] == 3
    assert "yes or no" in admin_cli("org", "set", org, "--enabled", "maybe", expect=2)
    assert "nothing to change" in admin_cli("org", "set", org, expect=2)
    assert "--max-running" in admin_cli("org", "set", org, "--max-running", "-1", expect=2)
    assert "default_max_cost_micros" in admin_cli("org", "set", org, "--default-max-cost", "1000000", expect=2)
    assert "no organization" in admin_cli("org", "set", "org_" + "0" * 32, "--enabled", "no", expect=2)
    assert "yes|no" in admin_cli("org", "set", "--help") and "org set" in subprocess.run(
        [f"{control.bin_dir}/ephemeral", "help", "admin"], capture_output=True, text=True, timeout=60, check=True).stdout


def test_what_a_disabled_organization_has_queued_does_not_start(control, paper):
    """It ends, unpaid, also when a host asks for work at the same moment; what runs goes on to its end."""
    owner = control.new_client()
    running = paper.start(paper.claim(owner.create(prompt="first")["id"]))
    queued = [owner.create(prompt="x", max_cost_micros=50000)["id"] for _ in range(20)]
    control.operator("PATCH", f"/orgs/{owner.org}", json={"disabled": True})
    assert not {work.run_id for work in paper.next()} & set(queued), "a host was given a run of a disabled organization"

    def all_ended():
        rows = control.query("SELECT status, error_message, cost[1] + cost[2] + cost[3] + cost[4] FROM runs WHERE run_id = ANY (%s) AND settled_at_ms > 0", queued)
        return rows if len(rows) == len(queued) else None
    for status, message, cost in wait.until(all_ended, 20, "the queued runs to end"):
        assert status == "cancelled" and "disabled" in message and cost == 0
    assert control.query("SELECT count(*) FROM queue WHERE org_id = %s", owner.org) == [(0,)]
    # With the organization back: its records say why, its money is there, it can go on.
    paper.finish(running)
    control.operator("PATCH", f"/orgs/{owner.org}", json={"disabled": False})
    check_timeline(owner.settled(queued[0], 20), owner.events(queued[0]))
    assert owner.settled(running.run_id, 20)["status"] == "succeeded"
    wait.until(lambda: owner.get("/v1/me")["reserved_micros"] == 0, 10, "the release")
    owner.cancel(owner.create(prompt="again")["id"])
    assert not [line for line in control.check_ledger() if line.startswith("FAIL")]


def test_a_run_that_comes_back_to_a_disabled_organizations_queue_ends(control, paper):
    """Claimed before, not started after: it is not claimed again."""
    owner = control.new_client()
    work = paper.claim(owner.create(prompt="x")["id"])
    control.operator("PATCH", f"/orgs/{owner.org}", json={"disabled": True})
    paper.rows("SELECT * FROM eph_refuse(%s, %s, %s, false, 'no_capacity', 'full')", paper.id, work.run_id, work.token)
    wait.until(lambda: control.query("SELECT status FROM runs WHERE run_id = %s", work.run_id) == [("cancelled",)], 20, "the run to end")


def test_hidden_hosts(cluster, bin_dir):
    """With hide_node nothing that a client can read has the host's name or id in it."""
    with control_rig.Control(cluster, bin_dir, hide_node="on") as own:
        own.until_ready()
        client = own.new_client()
        node = PaperNode(own.conninfo, name="secret-host")
        run = client.create(prompt="x")["id"]
        # The events of a claim are written by controld's own sessions: the host on paper stands in for one with the same setting.
        node.rows("SET ephemeral.hide_node = 'on'")
        work = node.claim(run)
        node.rows("SELECT * FROM eph_refuse(%s, %s, %s, false, 'no_capacity', 'full')", node.id, work.run_id, work.token)
        node.rows("UPDATE nodes_live SET hold_until_ms = 0")
        node.run_to_end(run)
        read = [client.settled(run, 20), client.events(run), client.get(f"/v1/runs/{run}/receipt"), client.get("/v1/runs"),
                [str(data) for _, _, data in client.stream(run)]]
        assert "run.requeued" in str(read) and "run.claimed" in str(read)
        for what in read:
            assert node.id not in str(what) and "secret-host" not in str(what), what
        assert read[2]["node"]["signature"] and read[2]["node"]["id"] is None
        check_chain(own.event_rows(run))
        # The sessions that controld makes have the setting: what its own sweep writes is hidden as well.
        lost = client.create(prompt="y")["id"]
        node.claim(lost)
        own.revoke("secret-host")
        wait.until(lambda: "run.requeued" in str(client.events(lost)), 20, "the sweep to take it from the revoked host")
        event = next(e for e in client.events(lost) if e["type"] == "run.requeued")
        assert "node" not in event["data"] and event["data"]["attempt"] == 1
        client.cancel(lost)
        node.close()
