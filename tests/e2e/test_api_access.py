"""Who may call what: every key that is none on every route, every role on every route, and another organization's things in every call that
takes an id. The calls come from the route table, so that a new one is tested the day it is written."""
import secrets
import threading
import time

import pytest
import requests
import wait
from api_rig import client, control, filled, paper, problem, routes  # noqa: F401

ROLES = ["VIEWER", "MEMBER", "ADMIN"]
GUARDED = [r for r in routes() if r.need != "NONE"]
WITH_ID = [r for r in GUARDED if "{" in r.pattern]


def name(route):
    return f"{route.method} {route.pattern}"


def url(control, route):
    return control.operator_url if route.listener == "OPERATOR" else control.url


def ask(control, route, key, path=None, base=None, **more):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if route.content == "BYTES":
        headers["Content-Type"] = "application/octet-stream"
        more.setdefault("data", b"x")
    elif route.content != "NONE":
        more.setdefault("json", {})
    return requests.request(route.method, (base or url(control, route)) + (path or filled(route.pattern)), headers=headers, timeout=30, **more)


@pytest.fixture(scope="module")
def keys(control):
    """One key of each kind: roles of one organization, and those that are none any more."""
    org, shut = control.new_org(), control.new_org()
    made = {role: control.new_key(org, role.lower()) for role in ROLES}
    made["OPERATOR"] = control.operator_key
    gone = control.operator("POST", f"/orgs/{org}/keys", json={"role": "admin"})
    control.operator("DELETE", f"/orgs/{org}/keys/{gone['id']}")
    made["revoked"] = gone["key"]
    # Expires at once: its time is moved back in the database, so that nobody waits for it.
    old = control.operator("POST", f"/orgs/{org}/keys", json={"role": "admin", "expires_at": "2999-01-01T00:00:00Z"})
    control.query("UPDATE api_keys SET expires_at_ms = 1 WHERE id = %s", old["id"])
    made["expired"] = old["key"]
    made["disabled"] = control.new_key(shut, "admin")
    control.operator("PATCH", f"/orgs/{shut}", json={"disabled": True})
    made["unknown"] = "eph_" + secrets.token_urlsafe(32)
    made["org"] = org
    return made


def test_the_open_ones_are_these():
    assert {r.pattern for r in routes() if r.need == "NONE"} == {"/healthz", "/readyz", "/problems/{name}"}
    assert all((r.need == "OPERATOR") == (r.listener == "OPERATOR") for r in GUARDED)


@pytest.mark.parametrize("route", GUARDED, ids=name)
def test_without_a_good_key(control, keys, route):
    """401 with WWW-Authenticate, for HEAD as well, before anything else of the request is looked at."""
    member = route.listener == "MEMBER"
    cases = [(None, "Bearer"), ("", "Bearer"), ("nonsense", "no key of this service"), ("eph_" if member else "ephop_", "not known"),
             (keys["unknown"] if member else "ephop_" + secrets.token_urlsafe(32), "not known"),
             (keys["OPERATOR"] if member else keys["ADMIN"], "listener")]
    if member:
        cases += [(keys["revoked"], "revoked"), (keys["expired"], "expired"), (keys["disabled"], "disabled")]
        cases += [(keys["ADMIN"] + "x", "not known"), (keys["ADMIN"][:-1], "not known"), (keys["ADMIN"].upper(), "no key")]
    for key, says in cases:
        answer = ask(control, route, key, **({} if route.content == "NONE" else {"data": b"\xff not JSON", "json": None}))
        found = problem(answer, 401, "unauthorized")
        assert says in found["detail"], (key, found)
        assert answer.headers["WWW-Authenticate"].startswith("Bearer"), key
    if route.method == "GET":
        head = requests.head(url(control, route) + filled(route.pattern), timeout=30)
        assert head.status_code == 401 and head.content == b""
    # Without a key nobody learns more than that the path is not here.
    other = control.url if route.listener == "OPERATOR" else control.operator_url
    assert "other listener" in problem(ask(control, route, None, base=other), 404, "not-found")["detail"]


@pytest.mark.parametrize("route", GUARDED, ids=name)
def test_roles(control, keys, route):
    """A role that is too low gets 403, which names both; one that is enough gets past the door (and finds nothing, or no body)."""
    for role in ROLES if route.listener == "MEMBER" else ["OPERATOR"]:
        answer = ask(control, route, keys[role])
        if role != "OPERATOR" and ROLES.index(role) < ROLES.index(route.need):
            found = problem(answer, 403, "forbidden")
            assert f"role {route.need.lower()} or more" in found["detail"] and f"role is {role.lower()}" in found["detail"]
        else:
            assert answer.status_code not in (401, 403) and answer.status_code < 500, answer.text


@pytest.mark.parametrize("route", [r for r in WITH_ID if r.listener == "MEMBER"], ids=name)
def test_of_another_organization(control, paper, route):
    """404, in the words of a thing that does not exist; and the thing stays as it is."""
    owner, stranger = control.new_client("admin"), control.new_client("admin")
    run = owner.create(prompt="secret")["id"]
    key = owner.call("POST", "/v1/keys", 201, json={"role": "viewer"}).json()
    member = owner.call("POST", "/v1/members", 201, json={"name": "Ada", "role": "viewer"}).json()
    things = {"runs": run, "keys": key["id"], "members": member["id"]}
    mine = things[route.pattern.split("/")[2]]
    for more in [{}, {"headers": {"Accept": "text/event-stream", "Authorization": f"Bearer {stranger.key}"}}] if "events" in route.pattern else [{}]:
        def call(path):
            body = {"json": {}} if route.content != "NONE" else {}
            return stranger.call(route.method, path, **body, **more)
        foreign = problem(call(filled(route.pattern, id=mine)), 404, "not-found")
        nothing = problem(call(filled(route.pattern)), 404, "not-found")
        assert foreign["detail"].replace(mine, "") == nothing["detail"].replace(f"{mine[:4]}{'0' * 32}", ""), "a stranger can tell a foreign thing from none"
        # What is no id at all is not found either, whatever it is made of.
        for odd in ("x", mine.upper(), mine + "0", mine[:-1], mine[:4] + "'--", "%F0%9F%92%A9", "..%2F..%2Fetc", "a" * 255):
            problem(call(filled(route.pattern, id=odd)), 404, "not-found")
    assert owner.read(run)["status"] == "queued"
    assert [k["revoked_at"] for k in owner.get("/v1/keys")["data"] if k["id"] == key["id"]] == [None]
    assert owner.get("/v1/members")["data"] == [member]
    owner.cancel(run)


@pytest.mark.parametrize("route", [r for r in WITH_ID if r.listener == "OPERATOR"], ids=name)
def test_operator_ids_that_are_none(control, route):
    for odd in (None, "x", "%F0%9F%92%A9", "a" * 255):
        answer = ask(control, route, control.operator_key, filled(route.pattern, id=odd, key=odd))
        assert answer.status_code in (400, 404), answer.text
        problem(answer, answer.status_code, "invalid-request" if answer.status_code == 400 else "not-found")


def test_a_key_of_another_organization_in_the_operators_path(control, paper):
    """Both ids exist, and do not belong together."""
    one, two = control.new_org(), control.new_org()
    key = control.operator("POST", f"/orgs/{one}/keys", json={"role": "viewer"})
    control.operator("DELETE", f"/orgs/{two}/keys/{key['id']}", expect=404)
    assert requests.get(f"{control.url}/v1/me", headers={"Authorization": f"Bearer {key['key']}"}, timeout=10).status_code == 200


def test_a_metadata_filter_shows_only_ones_own(control, paper):
    owner, stranger = control.new_client(), control.new_client()
    run = owner.create(prompt="x", metadata={"same": "label"})["id"]
    assert [r["id"] for r in owner.get("/v1/runs?metadata.same=label")["data"]] == [run]
    assert stranger.get("/v1/runs?metadata.same=label")["data"] == [] and stranger.get(f"/v1/runs?cursor={run}")["data"] == []
    owner.cancel(run)


# --- rights that end while something is open ---------------------------------------------------------------------------------------------


def stream_of(client, run):
    stream = client.stream(run, seconds=60)
    assert next(stream)[1] == "run.queued"
    return stream


def take_away(control, how, org, key):
    if how == "revoked":
        control.operator("DELETE", f"/orgs/{org}/keys/{key['id']}")
    elif how == "expired":
        control.query("UPDATE api_keys SET expires_at_ms = 1 WHERE id = %s", key["id"])
    else:
        control.operator("PATCH", f"/orgs/{org}", json={"disabled": True})


def test_streams_end_with_the_right_to_them(control, paper):
    """A stream ends within a heartbeat after its key was revoked, ran out, or its organization was disabled; others go on."""
    cases = {}
    for how in ("revoked", "expired", "disabled"):
        owner = control.new_client("admin")
        key = control.operator("POST", f"/orgs/{owner.org}/keys", json={"role": "viewer"})
        run = owner.create(prompt="x")["id"]
        cases[how] = (owner, key, run, stream_of(type(owner)(control.url, key["key"]), run))
    keeper = control.new_client()
    kept_run = keeper.create(prompt="x")["id"]
    kept = stream_of(keeper, kept_run)
    begin = time.monotonic()
    for how, (owner, key, _, _) in cases.items():
        take_away(control, how, owner.org, key)
    for how, (_, key, run, stream) in cases.items():
        seen = [kind for _, kind, _ in stream]
        assert "run.settled" not in seen[:-1] and (how == "disabled" or not seen), f"{how}: {seen}"
        answer = requests.get(f"{control.url}/v1/runs/{run}/events", headers={"Authorization": f"Bearer {key['key']}", "Last-Event-ID": "1"}, timeout=10)
        problem(answer, 401, "unauthorized")
    assert time.monotonic() - begin < 60, "15 s, and what a loaded machine takes"
    keeper.cancel(kept_run)
    assert [kind for _, kind, _ in kept][-1] == "run.settled", "a stream with a good key was cut as well"


def test_a_wait_shows_nothing_to_a_key_that_went(control, paper):
    owner = control.new_client("admin")
    key = control.operator("POST", f"/orgs/{owner.org}/keys", json={"role": "viewer"})
    run = owner.create(prompt="x")["id"]
    viewer = type(owner)(control.url, key["key"])
    result = []
    waiting = threading.Thread(target=lambda: result.append(viewer.call("GET", f"/v1/runs/{run}/wait?timeout_seconds=30")))
    waiting.start()
    # One loop takes requests as they come, but which comes first is not told: the wait is there when its first read has been made.
    wait.until(lambda: viewer.call("GET", "/v1/me").status_code == 200, 10, "the wait to be taken")
    control.operator("DELETE", f"/orgs/{owner.org}/keys/{key['id']}")
    owner.cancel(run)
    waiting.join(40)
    problem(result[0], 401, "unauthorized")
