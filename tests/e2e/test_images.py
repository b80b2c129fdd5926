"""Guest images in the control plane: uploads that break off, are wrong or come twice; which hosts shall have which; what hosts are given.
No guest: hosts are on paper. Hosts that fetch and boot are in test_image_hosts.py."""
import json

import pytest
import requests
from api_rig import admin_cli, control, paper, problem  # noqa: F401
from paper_node import PaperNode

import images

CHUNK = 262144


@pytest.fixture
def api(control):
    def call(method, path="", status=200, **kwargs):
        answer = requests.request(method, f"{control.operator_url}/v1/operator/images{path}", timeout=60,
                                  headers={"Authorization": f"Bearer {control.operator_key}", **kwargs.pop("headers", {})}, **kwargs)
        assert answer.status_code == status, answer.text
        return answer
    return call


def begin_body(folder):
    described = json.loads((folder / "image.json").read_text())
    return {"image": described["image"], "kernel_version": described["kernel_version"],
            **{name: described[name] for name in images.FILES}, **{f"{name}_bytes": (folder / file).stat().st_size for name, file in images.FILES.items()}}


def put(api, image, name, offset, data, status=204):
    return api("PUT", f"/{image}/{name}?offset={offset}", status, data=data, headers={"Content-Type": "application/octet-stream"})


def wanted(control, node):
    rows = control.query("SELECT hash FROM eph_image_wanted(%s, '', 'none', '')", node)
    return rows[0][0] if rows else None


def test_an_upload_goes_on_where_it_broke_off(control, api, admin_cli, tmp_path):
    image = images.make(tmp_path / "a", "broken off")
    api("POST", json=begin_body(tmp_path / "a"))
    kernel = (tmp_path / "a" / "vmlinux").read_bytes()
    put(api, image, "kernel", 0, kernel[:2 * CHUNK])
    put(api, image, "rootfs", 4 * CHUNK, (tmp_path / "a" / "rootfs.sqfs").read_bytes()[4 * CHUNK:5 * CHUNK])
    files = api("GET", f"/{image}").json()["files"]
    assert [files[name]["stored_bytes"] for name in images.FILES] == [2 * CHUNK, 0, 0]          # a piece behind a gap does not count
    assert "has not come as a whole" in problem(api("POST", f"/{image}/complete", 409), 409, "conflict")["detail"]
    assert "not complete" in problem(api("POST", f"/{image}/use", 409), 409, "conflict")["detail"]
    assert wanted(control, "node_x") is None
    kept = control.query("SELECT xmin FROM chunks WHERE position < 2 AND sha256 = %s ORDER BY position", bytes.fromhex(files["kernel"]["sha256"]))
    assert admin_cli("image", "add", str(tmp_path / "a")).split() == [image]
    assert kept == control.query("SELECT xmin FROM chunks WHERE position < 2 AND sha256 = %s ORDER BY position",
                                 bytes.fromhex(files["kernel"]["sha256"])), "what was there was sent again"
    assert api("GET", f"/{image}").json()["state"] == "ready"
    assert admin_cli("image", "add", str(tmp_path / "a")).split() == [image]                    # and once more: nothing to do
    admin_cli("image", "remove", image)
    assert control.query("SELECT count(*) FROM chunks WHERE org_id = ''") == [(0,)]


def test_bytes_that_are_not_those_of_the_hash(control, api, admin_cli, tmp_path):
    """Thrown away, and no other bytes: a whole upload follows. A description that does not fit its files is refused at once."""
    image = images.make(tmp_path / "w", "wrong")
    good = (tmp_path / "w" / "rootfs.sqfs").read_bytes()
    (tmp_path / "w" / "rootfs.sqfs").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "rootfs is not what its SHA-256 says" in admin_cli("image", "add", str(tmp_path / "w"), expect=3)
    files = api("GET", f"/{image}").json()["files"]
    assert [files[n]["stored_bytes"] for n in images.FILES] == [700_000, 1000, 0]
    (tmp_path / "w" / "rootfs.sqfs").write_bytes(good)
    assert admin_cli("image", "add", str(tmp_path / "w")).split() == [image]
    body = begin_body(tmp_path / "w")
    problem(api("POST", "", 400, json={**body, "image": "0" * 64}), 400, "invalid-request", "#/image")
    problem(api("POST", "", 400, json={**body, "kernel": "xyz", "rootfs_bytes": 0}), 400, "invalid-request", "#/kernel", "#/rootfs_bytes")
    assert "other sizes" in problem(api("POST", "", 409, json={**body, "kernel_bytes": 7}), 409, "conflict")["detail"]
    problem(put(api, image, "kernel", 1, b"x", 400), 400, "invalid-request", "offset")
    problem(put(api, image, "kernel", 0, b"x" * (4 * 1024 * 1024 + 1), 413), 413, "too-large")
    problem(put(api, "0" * 64, "kernel", 0, b"x", 404), 404, "not-found")
    problem(put(api, image, "disk", 0, b"x", 404), 404, "not-found")
    problem(api("PUT", f"/{image}/kernel", 415, data=b"x", headers={"Content-Type": "text/plain"}), 415, "unsupported-media-type")
    put(api, image, "kernel", 0, b"x")                                                          # of a complete file: it stays as it is
    assert api("GET", f"/{image}").json()["state"] == "ready"
    other = images.make(tmp_path / "o", "unfinished")
    api("POST", json=begin_body(tmp_path / "o"))
    assert "a piece is 262144 bytes" in problem(put(api, other, "kernel", 0, b"short", 409), 409, "conflict")["detail"]
    problem(put(api, other, "kernel", 3 * CHUNK, b"x" * CHUNK, 409), 409, "conflict")            # beyond its end
    for one in (image, other):
        admin_cli("image", "remove", one)


def test_rollout_by_label_and_back(control, api, admin_cli, tmp_path):
    one, two, three = (images.make(tmp_path / name, name, rootfs=300_000) for name in ("one", "two", "three"))
    for name in ("one", "two", "three"):
        admin_cli("image", "add", str(tmp_path / name), "--note", name)
    plain, canary = PaperNode(control.conninfo, name="plain"), PaperNode(control.conninfo, name="canary")
    control.query("UPDATE nodes SET labels = 'pool=canary,disk=fast' WHERE id = %s RETURNING 1", canary.id)

    def now():
        return wanted(control, plain.id), wanted(control, canary.id)
    assert now() == (None, None)
    assert "no image before" in admin_cli("image", "rollback", expect=3)
    admin_cli("image", "use", one)
    assert now() == (one, one)
    admin_cli("image", "use", two, "--label", "pool=canary")
    assert now() == (one, two)
    admin_cli("image", "use", three, "--label", "disk=fast")                                    # the latest word of a host's labels
    assert now() == (one, three)
    assert "in use for hosts labelled pool=canary" in admin_cli("image", "remove", two, expect=3)
    admin_cli("image", "use", two)
    assert now() == (two, three)
    admin_cli("image", "rollback")
    assert now() == (one, three)
    admin_cli("image", "rollback")                                                              # and forward again
    assert now() == (two, three)
    assert "had no image of their own" in admin_cli("image", "rollback", "--label", "pool=canary", expect=3)
    assert "a rollback goes to it" in admin_cli("image", "remove", one, expect=3)
    listed = {m["id"]: m for m in api("GET").json()["data"]}
    assert (listed[two]["used_by"], listed[one]["rollback_for"], listed[one]["note"]) == (["*", "pool=canary"], ["*"], "one")
    assert "KEY=VALUE" in admin_cli("image", "use", one, "--label", "canary", expect=2)
    problem(api("POST", f"/{one}/use", 400, json={"label": "a=b,c=d"}), 400, "invalid-request", "#/label")
    control.query("SELECT eph_image_wanted(%s, %s, 'fetching', '12 of 150 MiB')", plain.id, one)
    node = next(n for n in control.operator("GET", "/nodes")["data"] if n["id"] == plain.id)
    assert (node["image"], node["image_state"], node["image_note"]) == (one, "fetching", "12 of 150 MiB")
    control.revoke("canary")
    assert wanted(control, canary.id) is None
    for node in (plain, canary):
        node.close()
