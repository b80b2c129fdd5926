"""The switches of the stand-in do what its README says: a test of noded that uses one would prove nothing otherwise."""
import json
import os

import pytest
import vmm_rig
import wait


@pytest.fixture
def start(tmp_path):
    made = []

    def make(**faults):
        made.append(vmm_rig.Vmm(vmm_rig.stand_in(), tmp_path, faults=faults))
        return made[0]

    yield make
    for vmm in made:
        vmm.close()


def silent(vmm):
    """No answer, and none to anybody else either."""
    other = vmm_rig.Connection(vmm.api)
    other.send(vmm_rig.request("GET", "vmm.ping"))
    other.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        other.answer()


@pytest.mark.parametrize("call", ("create", "boot", "delete"))
def test_hang(start, call):
    vmm = start(hang=call)
    for name, body in (("create", vmm.config()), ("delete" if call == "delete" else "boot", None)):
        vmm.connection.send(vmm_rig.request("PUT", f"vm.{name}", body))
        if name == call:
            break
        assert vmm.connection.answer().status == 204
    silent(vmm)


def test_fail_and_exit(start):
    vmm = start(fail="boot", exit="delete")
    assert vmm.put("vm.create", vmm.config()).status == 204
    assert vmm.put("vm.boot").status == 500
    with pytest.raises((EOFError, ConnectionResetError)):
        vmm.put("vm.delete")
    assert vmm.ended() == 1


def test_info_and_version(start):
    vmm = start(info="differs", version="v52.0")
    assert vmm.get("vmm.ping").json["build_version"] == "v52.0"
    assert vmm.put("vm.create", vmm.config()).status == 204
    config = vmm.get("vm.info").json["config"]
    assert config["cpus"]["nested"] is True and config["cpus"]["boot_vcpus"] == 1


@pytest.mark.parametrize("kind", ("garbage", "cut", "huge"))
def test_replies(start, kind):
    vmm = start(replies=kind)
    vmm.connection.send(vmm_rig.request("GET", "vmm.ping"))
    vmm.connection.socket.settimeout(2)
    data = b""
    while len(data) < 100000:
        try:
            more = vmm.connection.socket.recv(65536)
        except TimeoutError:
            break
        if not more:
            break
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    said = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
    if kind == "garbage":
        assert not data.startswith(b"HTTP/")
    elif kind == "cut":
        assert data.startswith(b"HTTP/1.1 200") and (not said or len(body) < int(said[0].split()[1]))
    else:
        assert len(body) > int(said[0].split()[1])


@pytest.mark.parametrize("kind", ("flood", "garbage", "cut"))
def test_events(start, kind):
    vmm = start(events=kind, fail="boot")
    assert vmm.put("vm.create", vmm.config()).status == 204 and vmm.put("vm.boot").status == 500
    text = vmm.raw_events()
    if kind == "flood":
        assert len(text) > 60000  # what the pipe holds; the rest is lost, as with the real one
    else:
        with pytest.raises((AssertionError, json.JSONDecodeError)):
            vmm.events()


@pytest.mark.guest
def test_reboot(start, image):
    vmm = start(**{"reboot-after-ms": 50})
    assert vmm.put("vm.create", vmm.config(image)).status == 204 and vmm.put("vm.boot").status == 204
    wait.until(lambda: "vm/rebooted" in vmm.events(), 30, "the reboot")


def test_log(tmp_path):
    log = vmm_rig.Log(tmp_path)
    vmm = vmm_rig.Vmm(vmm_rig.stand_in(), tmp_path, faults={"fail": "boot"})
    try:
        assert vmm.put("vm.create", vmm.config()).status == 204 and vmm.get("vm.info").status == 200
        (create, info) = log.requests()
        assert create[:2] == ("PUT", "/api/v1/vm.create") and json.loads(create[2]) == vmm.config() and info == ("GET", "/api/v1/vm.info", b"")
    finally:
        vmm.close()
        log.close()
        os.unlink(tmp_path / "log.sock")
