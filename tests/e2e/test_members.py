"""Members of an organization: who makes them, what their keys may do, what goes with them. Against a real controld, without a guest."""

from api_rig import admin_cli, client, control, paper, problem  # noqa: F401
from client import Client
from store_db import in_threads

ADA = {"name": "Ada Lovelace", "email": "ada@example.com", "role": "admin"}


def add(admin, **fields):
    return admin.call("POST", "/v1/members", 201, json={"name": "Grace", "role": "member", **fields}).json()


def key_of(admin, member, role):
    return Client(admin.url, admin.call("POST", "/v1/keys", 201, json={"role": role, "member_id": member["id"]}).json()["key"])


def names(reader, query=""):
    return [m["name"] for m in reader.get(f"/v1/members{query}")["data"]]


def test_operator_makes_the_first(control):
    org = control.new_org()
    made = control.operator("POST", f"/orgs/{org}/members", 201, json=ADA)
    assert set(made) == {"id", "name", "email", "role", "created_at"} and {k: made[k] for k in ADA} == ADA
    assert control.operator("GET", f"/orgs/{org}/members")["data"] == [made]
    given = control.operator("POST", f"/orgs/{org}/keys", 201, json={"role": "admin", "member_id": made["id"]})
    assert given["member_id"] == made["id"]
    ada = Client(control.url, given["key"])
    assert ada.get("/v1/me")["role"] == "admin" and ada.get("/v1/members")["data"] == [made]
    add(ada)
    assert names(ada) == ["Grace", "Ada Lovelace"]
    assert [k["member_id"] for k in control.operator("GET", f"/orgs/{org}/keys")["data"]] == [made["id"]]
    nobody = "org_" + "0" * 32
    control.operator("POST", f"/orgs/{nobody}/members", 404, json=ADA)
    control.operator("POST", "/orgs/nonsense/members", 404, json=ADA)
    control.operator("GET", "/orgs/nonsense/members", 404)


def test_all_faults_at_once(control):
    admin = control.new_client("admin")
    answer = admin.call("POST", "/v1/members", json={"name": "é" * 129, "email": "nobody", "role": "king", "x": 1})
    problem(answer, 400, "invalid-request", "#/x", "#/name", "#/email", "#/role")
    problem(admin.call("POST", "/v1/members", json={}), 400, "invalid-request", "#/name", "#/role")
    problem(admin.call("POST", "/v1/members", json={"name": " ", "role": "viewer"}), 400, "invalid-request", "#/name")
    problem(admin.call("POST", "/v1/members", json={"name": 1, "email": "a@" + "b" * 253, "role": "viewer"}), 400, "invalid-request", "#/name", "#/email")
    longest = add(admin, name="é" * 128, email="a@" + "b" * 252)
    assert longest["name"] == "é" * 128 and len(longest["email"]) == 254
    emoji = add(admin, name="\U0001F600" * 128)
    assert emoji["name"] == "\U0001F600" * 128 and emoji["email"] is None
    problem(admin.call("PATCH", f"/v1/members/{emoji['id']}", json={"name": "", "role": None, "id": "x"}), 400, "invalid-request", "#/id", "#/name")
    assert {m["id"] for m in admin.get("/v1/members")["data"]} == {longest["id"], emoji["id"]}


def test_roles_of_those_who_ask(control):
    admin = control.new_client("admin")
    made = add(admin)
    viewer, member = (control.new_client(role, org=admin.org) for role in ("viewer", "member"))
    assert names(viewer) == names(member) == ["Grace"]
    for reader in (viewer, member):
        problem(reader.call("POST", "/v1/members", json=ADA), 403, "forbidden")
        problem(reader.call("PATCH", f"/v1/members/{made['id']}", json={"role": "admin"}), 403, "forbidden")
        problem(reader.call("DELETE", f"/v1/members/{made['id']}"), 403, "forbidden")


def test_pages(control):
    admin = control.new_client("admin")
    made = [add(admin, name=f"m{n}") for n in range(5)]
    made = [m["id"] for m in sorted(made, key=lambda m: (m["created_at"], m["id"]), reverse=True)]  # two may share a millisecond
    page = admin.get("/v1/members?limit=2")
    assert [m["id"] for m in page["data"]] == made[:2]
    # The page goes on where it was, also when its last member is removed.
    admin.call("DELETE", f"/v1/members/{made[1]}", 204)
    page = admin.get(f"/v1/members?limit=2&cursor={page['next_cursor']}")
    assert [m["id"] for m in page["data"]] == made[2:4]
    page = admin.get(f"/v1/members?limit=2&cursor={page['next_cursor']}")
    assert [m["id"] for m in page["data"]] == made[4:] and page["next_cursor"] is None


def test_change(control):
    admin = control.new_client("admin")
    made = add(admin, email="g@example.com")
    path = f"/v1/members/{made['id']}"
    assert admin.call("PATCH", path, 200, json={"name": "Grace Hopper"}).json() == {**made, "name": "Grace Hopper"}
    assert admin.call("PATCH", path, 200, json={"email": ""}).json()["email"] is None
    assert admin.call("PATCH", path, 200, json={}).json()["role"] == "member"
    problem(admin.call("PATCH", "/v1/members/nonsense", json={}), 404, "not-found")
    problem(admin.call("PATCH", "/v1/members/mem_" + "0" * 32, json={}), 404, "not-found")


def test_a_key_is_never_above_its_member(control, paper):
    admin = control.new_client("admin")
    made = add(admin, role="admin")
    keys = [key_of(admin, made, role) for role in ("admin", "member", "viewer")]
    path = f"/v1/members/{made['id']}"

    def roles():
        return [k.get("/v1/me")["role"] for k in keys]

    assert roles() == ["admin", "member", "viewer"]
    run = keys[1].create(prompt="x")
    assert control.query("SELECT member_id FROM runs WHERE run_id = %s", run["id"]) == [(made["id"],)]
    # Lowered: at once, though the keys were looked up a moment ago.
    admin.call("PATCH", path, 200, json={"role": "viewer"})
    assert roles() == ["viewer"] * 3
    problem(keys[0].call("GET", "/v1/keys"), 403, "forbidden")
    problem(keys[1].call("POST", f"/v1/runs/{run['id']}/cancel"), 403, "forbidden")
    assert {k["role"] for k in admin.get("/v1/keys")["data"] if k["member_id"]} == {"viewer"}
    answer = problem(admin.call("POST", "/v1/keys", json={"role": "member", "member_id": made["id"]}), 400, "invalid-request", "#/role")
    assert "viewer" in answer["errors"][0]["detail"]
    control.operator("POST", f"/orgs/{admin.org}/keys", 400, json={"role": "admin", "member_id": made["id"]})
    # Raised again: as far as each key goes by itself.
    admin.call("PATCH", path, 200, json={"role": "member"})
    assert roles() == ["member", "member", "viewer"]
    keys[1].cancel(run["id"])


def test_removed_with_all_keys(control):
    admin = control.new_client("admin")
    made, other = add(admin), add(admin, name="stays")
    keys, stays = [key_of(admin, made, "member") for _ in range(3)], key_of(admin, other, "member")
    for key in keys:
        key.get("/v1/me")
    path = f"/v1/members/{made['id']}"
    admin.call("DELETE", path, 204)
    for key in keys:
        assert "revoked" in problem(key.call("GET", "/v1/me"), 401, "unauthorized")["detail"]
    assert names(stays) == ["stays"]
    assert all(k["revoked_at"] for k in admin.get("/v1/keys")["data"] if k["member_id"] == made["id"])
    admin.call("DELETE", path, 204)
    problem(admin.call("PATCH", path, json={"name": "back"}), 404, "not-found")
    problem(admin.call("POST", "/v1/keys", json={"role": "viewer", "member_id": made["id"]}), 400, "invalid-request", "#/member_id")
    problem(admin.call("POST", "/v1/keys", json={"role": "viewer", "member_id": "x"}), 400, "invalid-request", "#/member_id")


def test_the_last_admin_stays(control):
    org = control.new_org()
    members = [control.operator("POST", f"/orgs/{org}/members", json={**ADA, "name": name}) for name in ("one", "two")]
    one, two = (Client(control.url, control.new_key(org, "admin", member_id=m["id"])) for m in members)
    paths = [f"/v1/members/{m['id']}" for m in members]
    two.call("PATCH", paths[0], 200, json={"role": "member"})
    # The first one's key is an admin's in name only now.
    for answer in (two.call("DELETE", paths[1]), two.call("PATCH", paths[1], json={"role": "viewer", "name": "x"})):
        assert "last admin key" in problem(answer, 409, "conflict")["detail"]
    problem(two.call("DELETE", f"/v1/keys/{two.get('/v1/me')['key']['id']}"), 409, "conflict")
    two.call("PATCH", paths[1], 200, json={"role": "admin", "name": "still"})
    two.call("PATCH", paths[0], 200, json={"role": "admin"})
    # Each takes the other away at the same moment: one of them must stay.
    statuses = in_threads(2, lambda i: (one, two)[i].call("DELETE", paths[1 - i]).status_code)
    assert sorted(statuses) in ([204, 401], [204, 409]), statuses
    assert sorted(c.call("GET", "/v1/keys").status_code for c in (one, two)) == [200, 401]


def test_another_organization(control):
    admin, stranger = control.new_client("admin"), control.new_client("admin")
    made = add(admin)
    path = f"/v1/members/{made['id']}"
    problem(stranger.call("PATCH", path, json={"role": "admin"}), 404, "not-found")
    problem(stranger.call("DELETE", path), 404, "not-found")
    problem(stranger.call("POST", "/v1/keys", json={"role": "viewer", "member_id": made["id"]}), 400, "invalid-request", "#/member_id")
    control.operator("POST", f"/orgs/{stranger.org}/keys", 400, json={"role": "viewer", "member_id": made["id"]})
    assert names(stranger) == [] and names(stranger, f"?cursor={made['id']}") == [] and names(admin) == ["Grace"]


def test_a_thousand(control):
    admin = control.new_client("admin")
    control.query("INSERT INTO members (id, org_id, name, role, created_at_ms) SELECT 'mem_' || md5(%s || n), %s, 'm', 'viewer', n "
                  "FROM generate_series(1, 999) n", admin.org, admin.org)
    last = add(admin)
    assert "1000" in problem(admin.call("POST", "/v1/members", json=ADA), 409, "conflict")["detail"]
    admin.call("DELETE", f"/v1/members/{last['id']}", 204)
    add(admin)


def test_command_line(control, admin_cli):
    org = control.new_org()
    member = admin_cli("member", "add", org, "Ada", "--role", "viewer", "--email", "ada@example.com").strip()
    shown = admin_cli("member", "list", org)
    assert member in shown and "viewer" in shown and "ada@example.com" in shown
    key = admin_cli("key", "create", org, "--role", "viewer", "--member", member).split()[0]
    assert Client(control.url, key).get("/v1/me")["role"] == "viewer"
    assert "above the role" in admin_cli("key", "create", org, "--member", member, expect=2)
    assert "role" in admin_cli("member", "add", org, "Bob", "--role", "king", expect=2)
