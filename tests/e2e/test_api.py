"""The public API against a real controld and Postgres: keys, paths, bodies, create, idempotency, lists, operator. Runs stay queued."""
import concurrent.futures
import hashlib
import json
import re
import time

import pytest
import requests
import wait
from api_rig import client, control, paper, problem  # noqa: F401
from paper_node import PaperNode

import control as control_rig

RUN_FIELDS = {"id", "status", "output", "error", "cost_micros", "cost_final", "cost_note", "billing_pending", "cost", "usage", "reserved_micros",
              "released_micros", "created_at", "started_at", "ended_at", "expires_at", "request", "isolation", "node", "url", "waiting_for",
              "cancel_requested_at", "model", "workflow", "web", "shell", "timeout_seconds", "max_cost_micros", "size", "metadata", "files", "prompt",
              "max_model_calls", "zero_data_retention"}
LIST_LEAVES_OUT = {"output", "files", "request"}


# --- who asks ------------------------------------------------------------------------------------------------------------------------


def test_no_key(control):
    answer = requests.get(f"{control.url}/v1/me", timeout=10)
    problem(answer, 401, "unauthorized")
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "Bearer nonsense", "Bearer eph_nonsense", "eph_x", "Bearer eph_" + "x" * 5000],
                         ids=range(7))
def test_bad_key(control, header):
    answer = requests.get(f"{control.url}/v1/me", headers={"Authorization": header}, timeout=10)
    problem(answer, 401, "unauthorized")


def test_nearly_a_key(control, client):
    """Every character counts, also while the good key is in memory."""
    client.get("/v1/me")
    last = "A" if client.key[-1] != "A" else "E"
    for key in (client.key[:-1], client.key[:-1] + last, client.key + "A", client.key[:4] + client.key[4:].swapcase(), "eph_" + "A" * 43):
        problem(control_rig.client_rig.Client(control.url, key).call("GET", "/v1/me"), 401, "unauthorized")
    client.get("/v1/me")


def test_keys_on_the_wrong_listener(control, client):
    answer = requests.get(f"{control.url}/v1/me", headers={"Authorization": f"Bearer {control.operator_key}"}, timeout=10)
    assert "operator listener" in problem(answer, 401, "unauthorized")["detail"]
    answer = requests.get(f"{control.operator_url}/v1/operator/orgs", headers={"Authorization": f"Bearer {client.key}"}, timeout=10)
    assert "public listener" in problem(answer, 401, "unauthorized")["detail"]
    # Neither listener has the other's paths.
    problem(client.call("GET", "/v1/operator/orgs"), 404, "not-found")
    answer = requests.get(f"{control.operator_url}/v1/me", headers={"Authorization": f"Bearer {control.operator_key}"}, timeout=10)
    problem(answer, 404, "not-found")


def test_roles(control, client):
    viewer = control.new_client("viewer", org=client.org)
    viewer.get("/v1/me")
    viewer.get("/v1/runs")
    assert "member" in problem(viewer.call("POST", "/v1/runs", json={"prompt": "x"}), 403, "forbidden")["detail"]
    assert "admin" in problem(client.call("GET", "/v1/keys"), 403, "forbidden")["detail"]
    run = client.create(prompt="x")
    problem(viewer.call("POST", f"/v1/runs/{run['id']}/cancel"), 403, "forbidden")
    viewer.read(run["id"])
    client.cancel(run["id"])


def test_key_life(control):
    admin = control.new_client("admin")
    made = admin.call("POST", "/v1/keys", 201, json={"role": "member", "name": "robot"}).json()
    assert re.fullmatch(r"eph_[A-Za-z0-9_-]{43}", made["key"]) and made["role"] == "member"
    other = control_rig.client_rig.Client(control.url, made["key"])
    assert other.get("/v1/me")["role"] == "member"
    listed = admin.get("/v1/keys")["data"]
    assert {k["id"] for k in listed} >= {made["id"]} and not any("key" in k for k in listed), "a secret in a list"
    admin.call("DELETE", f"/v1/keys/{made['id']}", 204)
    assert "revoked" in problem(other.call("GET", "/v1/me"), 401, "unauthorized")["detail"]
    admin.call("DELETE", f"/v1/keys/{made['id']}", 204)
    # The last admin key stays: who could make another?
    mine = admin.get("/v1/me")["key"]["id"]
    problem(admin.call("DELETE", f"/v1/keys/{mine}"), 409, "conflict")
    # Not another organization's key.
    stranger = control.new_client("admin")
    problem(stranger.call("DELETE", f"/v1/keys/{mine}"), 404, "not-found")
    problem(admin.call("POST", "/v1/keys", json={"role": "king", "x": 1, "expires_at": "2001-01-01T00:00:00Z"}), 400, "invalid-request", "#/x", "#/role",
            "#/expires_at")


def test_key_expires(control, client):
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 2))
    key = control.new_key(client.org, expires_at=soon)
    short = control_rig.client_rig.Client(control.url, key)
    wait.until(lambda: short.call("GET", "/v1/me").status_code == 401, 10, "the key to expire")
    assert "expired" in problem(short.call("GET", "/v1/me"), 401, "unauthorized")["detail"]


# --- paths, methods, bodies -----------------------------------------------------------------------------------------------------------


def test_unknown_paths_and_methods(client):
    problem(client.call("GET", "/v1/nothing"), 404, "not-found")
    problem(client.call("GET", "/v1/runs/"), 404, "not-found")
    answer = client.call("PUT", "/v1/runs", json={})
    problem(answer, 405, "method-not-allowed")
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD", "POST", "OPTIONS"}
    answer = client.call("OPTIONS", "/v1/runs")
    assert answer.status_code == 204 and "POST" in answer.headers["Allow"]


def test_head(client):
    with_body = client.call("GET", "/v1/models", 200)
    head = client.call("HEAD", "/v1/models", 200)
    assert head.content == b"" and head.headers["Content-Length"] == with_body.headers["Content-Length"]
    run = client.create(prompt="x")
    head = client.call("HEAD", f"/v1/runs/{run['id']}/events", 200, headers={"Accept": "text/event-stream"})
    assert head.content == b""
    client.cancel(run["id"])


def test_query_parameters(client):
    problem(client.call("GET", "/v1/me?x=1"), 400, "invalid-request", "x")
    problem(client.call("GET", "/v1/runs?limit=0&nonsense=1&status=done"), 400, "invalid-request")
    problem(client.call("GET", "/v1/runs?limit=1&limit=2"), 400, "invalid-request")
    problem(client.call("GET", "/v1/runs?limit=101"), 400, "invalid-request", "limit")
    problem(client.call("GET", "/v1/runs?limit=ten"), 400, "invalid-request", "limit")
    problem(client.call("GET", "/v1/runs?cursor=run_zz"), 400, "invalid-request", "cursor")
    problem(client.call("GET", "/v1/runs?%ff=1"), 400, "invalid-request")


def test_media_types(client):
    body = json.dumps({"prompt": "x"})
    problem(client.call("POST", "/v1/runs", data=body, headers={"Content-Type": "text/plain"}), 415, "unsupported-media-type")
    problem(client.call("POST", "/v1/runs", data=body), 415, "unsupported-media-type")
    problem(client.call("POST", "/v1/runs", data=body, headers={"Content-Type": "application/json", "Content-Encoding": "gzip"}), 415,
            "unsupported-media-type")
    problem(client.call("POST", "/v1/runs"), 400, "invalid-request", "#")
    problem(client.call("GET", "/v1/me", data="x"), 400, "invalid-request")
    answer = client.call("POST", "/v1/runs", data=body, headers={"Content-Type": "application/json; charset=utf-8"})
    assert answer.status_code == 201
    client.cancel(answer.json()["id"])


def test_too_large(client):
    body = json.dumps({"prompt": "x", "files": [{"path": "a", "content": "y" * (13 * 1024 * 1024)}]})
    answer = client.call("POST", "/v1/runs", data=body, headers={"Content-Type": "application/json"})
    assert str(12 * 1024 * 1024) in problem(answer, 413, "too-large")["detail"]


def test_problem_pages(control, client):
    answer = client.call("POST", "/v1/runs", json={})
    page = requests.get(problem(answer, 400, "invalid-request")["type"], timeout=10)
    assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/plain") and "errors" in page.text
    problem(requests.get(f"{control.url}/problems/nonsense", timeout=10), 404, "not-found")


def test_every_answer_is_named_and_not_cached(client):
    for path in ("/v1/me", "/v1/nothing"):
        answer = client.call("GET", path)
        assert answer.headers["Request-Id"].startswith("req_") and answer.headers["Cache-Control"] == "no-store"


# --- create ---------------------------------------------------------------------------------------------------------------------------


def test_create(control, client):
    body = {"prompt": "Say grüße.", "web": False, "shell": True, "timeout_seconds": 120, "max_cost_micros": 40000, "size": "small",
            "metadata": {"team": "a", "ü": "€"}, "files": [{"path": "d/a.txt", "content": "hi"}, {"path": "b", "content_base64": "AAE="}]}
    answer = client.call("POST", "/v1/runs", 201, json=body)
    run = answer.json()
    assert answer.headers["Location"] == f"/v1/runs/{run['id']}" and "Idempotency-Replayed" not in answer.headers
    assert re.fullmatch(r"run_[0-9a-f]{32}", run["id"])
    assert set(run) == RUN_FIELDS
    assert run["status"] == "queued" and run["output"] is None and run["error"] is None
    assert run["reserved_micros"] == 40000 and run["released_micros"] == 0
    assert run["cost_micros"] == 40000 and not run["cost_final"] and run["cost_note"] and sum(run["cost"].values()) == 40000
    assert run["usage"]["total_tokens"] == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", run["created_at"])
    assert run["started_at"] is None and run["ended_at"] is None
    assert run["model"] == "scripted/auto" and run["size"] == "small" and run["shell"] is True and run["web"] is False
    assert run["timeout_seconds"] == 120 and run["max_model_calls"] == 100 and run["metadata"] == body["metadata"]
    assert run["url"] == f"{control.url}/v1/runs/{run['id']}"
    files = [{"path": "d/a.txt", "size": 2, "sha256": hashlib.sha256(b"hi").hexdigest()},
             {"path": "b", "size": 2, "sha256": hashlib.sha256(b"\0\1").hexdigest()}]
    assert run["files"] == files
    assert run["request"] == {**body, "files": files}
    assert client.read(run["id"]) == {**run, "waiting_for": client.read(run["id"])["waiting_for"]}
    me = client.get("/v1/me")
    assert me["reserved_micros"] == 40000 and me["available_micros"] == me["balance_micros"] - 40000 and me["runs"]["queued"] == 1
    ended = client.cancel(run["id"])
    assert ended["status"] == "cancelled" and ended["cost_micros"] == 0


def test_all_field_errors_at_once(client):
    body = {"prompt": 7, "shell": "x", "timeout_seconds": 0, "web": True, "nonsense": 1, "files": [{"path": "..", "content": "x"}]}
    found = problem(client.call("POST", "/v1/runs", json=body), 400, "invalid-request", "#/prompt", "#/shell", "#/timeout_seconds", "#/web", "#/nonsense",
                    "#/files/0/path")
    assert "3600" in found["errors"][2]["detail"]


@pytest.mark.parametrize("field, value", [("workflow", "w"), ("web", True), ("web", {"allow_domains": ["example.com"]}), ("connections", {"a": "b"}),
                                          ("output_schema", {}), ("zero_data_retention", True), ("callback_url", "https://example.com/"),
                                          ("outputs", ["a"]), ("input", {"a": 1})])
def test_not_available(client, field, value):
    found = problem(client.call("POST", "/v1/runs", json={"prompt": "x", field: value}), 400, "not-available", f"#/{field}")
    assert field in found["detail"]


def test_model_checks(control, client):
    problem(client.call("POST", "/v1/runs", json={"prompt": "x", "model": "no/such"}), 400, "invalid-request", "#/model")
    control.operator("PUT", "/models/scripted/unpriced", json={})
    assert "price" in problem(client.call("POST", "/v1/runs", json={"prompt": "x", "model": "scripted/unpriced"}), 400, "invalid-request", "#/model")["detail"]
    low = problem(client.call("POST", "/v1/runs", json={"prompt": "x", "max_cost_micros": 1}), 400, "invalid-request", "#/max_cost_micros")
    minimum = int(re.search(r"at least (\d+)", low["detail"]).group(1))
    problem(client.call("POST", "/v1/runs", json={"prompt": "x", "max_cost_micros": minimum - 1}), 400, "invalid-request", "#/max_cost_micros")
    client.cancel(client.create(prompt="x", max_cost_micros=minimum)["id"])


def test_balance(control, client):
    poor = control.new_client(credit=0)
    found = problem(poor.call("POST", "/v1/runs", json={"prompt": "x", "max_cost_micros": 40000}), 402, "insufficient-balance")
    assert "40000" in found["detail"] and "admin org credit" in found["detail"] and poor.org in found["detail"]
    # A refusal leaves nothing behind: with the same key it works after a top-up.
    headers = {"Idempotency-Key": "top-up"}
    problem(poor.call("POST", "/v1/runs", json={"prompt": "x", "max_cost_micros": 40000}, headers=headers), 402, "insufficient-balance")
    control.credit(poor.org, 40000)
    answer = poor.call("POST", "/v1/runs", 201, json={"prompt": "x", "max_cost_micros": 40000}, headers=headers)
    assert "Idempotency-Replayed" not in answer.headers
    assert poor.get("/v1/me")["available_micros"] == 0
    poor.cancel(answer.json()["id"])
    wait.until(lambda: poor.get("/v1/me")["available_micros"] == 40000, 10, "the release")


def test_no_node_could_serve(control, paper):
    tight = control.new_client(allow_emulated=False)
    tight.cancel(tight.create(prompt="x")["id"])
    control.operator("PATCH", f"/orgs/{tight.org}", json={"allow_emulated": False})


def test_too_many_queued(control, paper):
    small = control.new_client(max_queued_runs=2)
    runs = [small.create(prompt="x")["id"] for _ in range(2)]
    answer = small.call("POST", "/v1/runs", json={"prompt": "x"})
    assert "2" in problem(answer, 429, "rate-limited")["detail"] and int(answer.headers["Retry-After"]) > 0
    assert answer.headers["RateLimit-Policy"] == '"queued-runs";q=2' and answer.headers["RateLimit"].startswith('"queued-runs";r=0;')
    for run in runs:
        small.cancel(run)


# --- idempotency ----------------------------------------------------------------------------------------------------------------------


def test_idempotency(client):
    headers = {"Idempotency-Key": "k-1"}
    first = client.call("POST", "/v1/runs", 201, data='{"prompt":"p","shell":true}', headers={**headers, "Content-Type": "application/json"})
    again = client.call("POST", "/v1/runs", 201, data='{ "shell": true, "prompt": "\\u0070" }',
                        headers={"Idempotency-Key": '"k-1"', "Content-Type": "application/json"})
    assert again.json()["id"] == first.json()["id"] and again.headers["Idempotency-Replayed"] == "true"
    in_body = client.call("POST", "/v1/runs", 201, json={"prompt": "p", "shell": True, "idempotency_key": "k-1"})
    assert in_body.json()["id"] == first.json()["id"]
    problem(client.call("POST", "/v1/runs", json={"prompt": "q", "shell": True}, headers=headers), 422, "idempotency-mismatch")
    problem(client.call("POST", "/v1/runs", json={"prompt": "p", "idempotency_key": "other"}, headers=headers), 400, "invalid-request", "#/idempotency_key")
    problem(client.call("POST", "/v1/runs", json={"prompt": "p"}, headers={"Idempotency-Key": "k" * 256}), 400, "invalid-request", "Idempotency-Key")
    client.cancel(first.json()["id"])
    # Rendered now: the replay shows the cancelled run.
    again = client.call("POST", "/v1/runs", 201, json={"prompt": "p", "shell": True}, headers=headers)
    assert again.json()["status"] == "cancelled"


def test_keys_belong_to_organizations(control, client):
    other = control.new_client()
    headers = {"Idempotency-Key": "same"}
    one = client.call("POST", "/v1/runs", 201, json={"prompt": "p"}, headers=headers).json()
    two = other.call("POST", "/v1/runs", 201, json={"prompt": "p"}, headers=headers).json()
    assert one["id"] != two["id"]
    client.cancel(one["id"])
    other.cancel(two["id"])


def test_hundred_equal_creates_make_one_run(control, paper):
    client = control.new_client()

    def create(_):
        return requests.post(f"{control.url}/v1/runs", json={"prompt": "once", "max_cost_micros": 50000}, timeout=60,
                             headers={"Authorization": f"Bearer {client.key}", "Idempotency-Key": "once"})

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(create, range(100)))
    assert {a.status_code for a in answers} <= {201, 409}, {a.status_code for a in answers}
    made = [a for a in answers if a.status_code == 201]
    assert made and len({a.json()["id"] for a in made}) == 1
    assert sum("Idempotency-Replayed" not in a.headers for a in made) <= 1
    for busy in (a for a in answers if a.status_code == 409):
        problem(busy, 409, "idempotency-in-progress")
        assert busy.headers["Retry-After"]
    runs = client.get("/v1/runs")["data"]
    assert len(runs) == 1
    assert client.get("/v1/me")["reserved_micros"] == 50000
    client.cancel(runs[0]["id"])


# --- other organizations ---------------------------------------------------------------------------------------------------------------


def test_another_organizations_run_is_not_found(control, client):
    run = client.create(prompt="secret")["id"]
    stranger = control.new_client("admin")
    for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/wait"), ("GET", "/events"), ("GET", "/receipt")):
        answer = stranger.call(method, f"/v1/runs/{run}{path}")
        found = problem(answer, 404, "not-found")
        missing = problem(stranger.call(method, f"/v1/runs/run_{'0' * 32}{path}"), 404, "not-found")
        assert found["detail"] == missing["detail"], "a stranger can tell a foreign run from none"
    problem(stranger.call("GET", f"/v1/runs/{run}/events", headers={"Accept": "text/event-stream"}), 404, "not-found")
    assert stranger.get("/v1/runs")["data"] == []
    problem(client.call("GET", "/v1/runs/nonsense"), 404, "not-found")
    assert client.read(run)["status"] == "queued"
    client.cancel(run)


# --- lists ------------------------------------------------------------------------------------------------------------------------------


def test_lists(control, paper):
    client = control.new_client()
    made = [client.create(prompt=f"p{i} " + "€" * 300, metadata={"n": str(i % 2), "all": "yes"})["id"] for i in range(7)]
    page = client.get("/v1/runs?limit=3")
    seen = [r["id"] for r in page["data"]]
    while page["next_cursor"]:
        page = client.get(f"/v1/runs?limit=3&cursor={page['next_cursor']}")
        seen += [r["id"] for r in page["data"]]
    assert seen == made[::-1]
    one = client.get("/v1/runs?limit=1")["data"][0]
    assert set(one) == RUN_FIELDS - LIST_LEAVES_OUT and len(one["prompt"]) == 200
    client.cancel(made[0])
    assert [r["id"] for r in client.get("/v1/runs?status=cancelled")["data"]] == [made[0]]
    assert len(client.get("/v1/runs?status=queued")["data"]) == 6
    assert [r["id"] for r in client.get("/v1/runs?metadata.n=1&metadata.all=yes")["data"]] == [made[5], made[3], made[1]]
    assert client.get("/v1/runs?metadata.n=1&metadata.all=no")["data"] == []
    for run in made[1:]:
        client.cancel(run)


# --- me, models, operator ----------------------------------------------------------------------------------------------------------------


def test_me(client):
    me = client.get("/v1/me")
    assert me["organization"]["id"] == client.org and me["role"] == "member" and me["default_model"] == "scripted/auto"
    assert me["balance_micros"] == control_rig.CREDIT and me["budgets"] == []
    assert me["limits"]["max_timeout_seconds"] == 3600 and me["limits"]["sizes"]["small"] == {"memory_mib": 256, "vcpus": 1}
    assert set(me["rates"]) == {"run_fee_micros", "compute_micros_per_million_ms", "model_percent_hundredths", "web_request_micros_per_million",
                                "web_search_micros_per_million"}


def test_models(control, client):
    models = {m["id"]: m for m in client.get("/v1/models")["data"]}
    assert models["scripted/auto"]["input_micros_per_million"] == 50000 and models["scripted/auto"]["default"]
    assert models["scripted/shell"]["min_cost_micros"] >= 0 and models["scripted/shell"]["scripted"]
    assert "base_url" not in json.dumps(models) and "scripted/unpriced" not in models


def test_members(client):
    assert client.get("/v1/members")["data"] == []


def test_operator_orgs(control):
    org = control.operator("POST", "/orgs", json={"name": "acme", "unlimited": True, "default_model": "scripted/shell"})
    assert org["unlimited"] and org["default_model"] == "scripted/shell" and org["balance_micros"] == 0 and re.fullmatch(r"org_[0-9a-f]{32}", org["id"])
    answer = requests.post(f"{control.operator_url}/v1/operator/orgs", json={"name": "acme"}, timeout=10,
                           headers={"Authorization": f"Bearer {control.operator_key}"})
    problem(answer, 409, "conflict")
    changed = control.operator("PATCH", f"/orgs/{org['id']}", json={"allow_emulated": True, "max_queued_runs": 5})
    assert changed["allow_emulated"] and changed["max_queued_runs"] == 5 and changed["unlimited"]
    assert any(o["id"] == org["id"] for o in control.operator("GET", "/orgs?limit=100")["data"])
    control.operator("PATCH", f"/orgs/{org['id']}", json={"default_model": "no/such"}, expect=400)
    control.operator("POST", "/orgs", json={"name": "other", "default_model": "no/such"}, expect=400)
    control.operator("PATCH", f"/orgs/org_{'0' * 32}", json={"unlimited": True}, expect=404)
    control.operator("PATCH", "/orgs/nonsense", json={"unlimited": True}, expect=404)
    control.operator("POST", f"/orgs/org_{'0' * 32}/keys", json={"role": "member"}, expect=404)
    # Disabled: its keys stop at once.
    key = control.new_key(org["id"])
    shut = control_rig.client_rig.Client(control.url, key)
    shut.get("/v1/me")
    control.operator("PATCH", f"/orgs/{org['id']}", json={"disabled": True})
    assert "disabled" in problem(shut.call("GET", "/v1/me"), 401, "unauthorized")["detail"]


def test_operator_credit(control):
    org = control.new_org(credit=0)
    headers = {"Idempotency-Key": "credit-1"}
    assert control.credit(org, 500, headers=headers)["balance_micros"] == 500
    assert control.credit(org, 500, headers=headers)["balance_micros"] == 500
    control.credit(org, 501, headers=headers, expect=422)
    assert control.credit(org, -200)["balance_micros"] == 300
    control.credit(org, -301, expect=409)
    control.credit(org, 0, expect=400)
    control.credit("org_" + "0" * 32, 5, expect=404)
    control.operator("POST", f"/orgs/{org}/credit", json={"amount_micros": "5", "nonsense": 1}, expect=400)


def test_operator_catalog(control):
    control.operator("PUT", "/providers/acme", json={"base_url": "https://api.example.com/v1", "api_key": "sk-secret-canary"})
    listed = control.operator("GET", "/providers")["data"]
    assert next(p for p in listed if p["name"] == "acme") == {"name": "acme", "base_url": "https://api.example.com/v1", "any_address": False, "has_key": True}
    assert "canary" not in json.dumps(listed) and "canary" not in control.log_text()
    control.operator("PUT", "/providers/acme", json={"base_url": "https://api.example.com/v2"})
    assert next(p for p in control.operator("GET", "/providers")["data"] if p["name"] == "acme")["has_key"], "a PUT without a key drops it"
    for bad in ("http://api.example.com/v1", "https://user@host/v1", "ftp://x", "https://", "https://x/v1/", "https://x/v1?k=1", ""):
        control.operator("PUT", "/providers/acme", json={"base_url": bad}, expect=400)
    control.operator("PUT", "/models/nobody/x", json={}, expect=404)
    model = control.operator("PUT", "/models/acme/vendor/big-1", json={"limit_param": "max_tokens", "max_output_tokens": 4096})
    assert model["id"] == "acme/vendor/big-1" and model["upstream"] == "vendor/big-1" and not model["priced"] and model["limit_param"] == "max_tokens"
    priced = control.operator("PUT", "/prices/acme/vendor/big-1", json={"input_micros_per_million": 3_000_000, "output_micros_per_million": 15_000_000})
    assert priced["priced"] and priced["cached_input_micros_per_million"] == 3_000_000 and priced["min_cost_micros"] > 0
    control.operator("PUT", "/prices/acme/none", json={"input_micros_per_million": 1, "output_micros_per_million": 1}, expect=404)
    control.operator("PUT", "/prices/acme/vendor/big-1", json={"input_micros_per_million": -1}, expect=400)


def test_operator_nodes(control, paper):
    token = control.operator("POST", "/node-tokens", json={"uses": 3, "labels": "region=eu", "isolation": "emulated"})
    assert token["token"].startswith("ephnt_") and "." in token["token"] and token["uses"] == 3 and token["isolation"] == "emulated"
    control.operator("POST", "/node-tokens", json={"uses": 0, "isolation": "gvisor", "labels": "a b"}, expect=400)
    other = PaperNode(control.conninfo, name="drained", memory=1, vcpus=1, slots=1)
    assert control.node("drained")["live"]
    assert control.drain("drained")["state"] == "draining"
    assert control.undrain("drained")["state"] == "active"
    assert control.revoke("drained")["state"] == "revoked"
    control.operator("POST", f"/nodes/{other.id}/undrain", expect=409)
    control.operator("POST", f"/nodes/node_{'0' * 32}/drain", expect=404)
    other.close()


def test_ledger_holds(control):
    assert not [line for line in control.check_ledger() if line.startswith("FAIL")]
