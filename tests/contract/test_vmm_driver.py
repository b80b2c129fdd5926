"""What noded's driver asks of Cloud Hypervisor, as it really asks it, held against the published description of the API; and what becomes of a run
when the VMM does not behave. The log of its requests and the faults are the stand-in's."""
import json
import pathlib
import shutil
import tempfile

import pytest
import vmm_rig
from client import check_timeline, say, shell, turns


@pytest.fixture
def folder():
    """One that the VMM's user may reach."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="eph-vmm-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def node_with(folder, **faults):
    return {**vmm_rig.node_config(folder, faults), "max_vms": 1, "vmm": "cloud-hypervisor"}


@pytest.mark.guest
def test_requests_of_a_run(make_stack, folder):
    """ping, create, info, boot, in this order and once each; every byte of them as described."""
    log = vmm_rig.Log(folder)
    stack = make_stack(node=node_with(folder))
    client = stack.client()
    run = client.run(turns(shell("echo from the guest"), say("done")))
    assert run["status"] == "succeeded", run["error"]
    check_timeline(run, client.events(run["id"]))
    requests = log.requests()
    log.close()
    assert [(method, path) for method, path, _ in requests] == [("GET", "/api/v1/vmm.ping"), ("PUT", "/api/v1/vm.create"), ("GET", "/api/v1/vm.info"),
                                                                ("PUT", "/api/v1/vm.boot")], requests
    config = json.loads(requests[1][2])
    # What the defaults of the program would have given to the guest, and what must not be there at all.
    assert config["cpus"]["nested"] is False and config["memory"]["mergeable"] is False and config["console"]["mode"] != "Tty"
    assert not {"net", "fs", "devices", "user_devices", "vdpa", "pmem"} & set(config)
    assert all(disk["readonly"] is True and disk["image_type"] == "Raw" for disk in config["disks"])
    spec = vmm_rig.description()
    if not spec:
        pytest.skip("there is no copy of the API's description here (EPHEMERAL_SHARED); the order and the defaults were checked")
    for method, path, body in requests:
        assert not vmm_rig.body_breaches(spec, method, path, body), (path, body)


# A hang lasts until the start is over its time; the others are noticed at once.
FAULTS = {
    "create-hangs": {"hang": "create"},
    "boot-fails": {"fail": "boot"},
    "boot-exits": {"exit": "boot"},
    "info-differs": {"info": "differs"},
    "garbage": {"replies": "garbage"},
    "cut": {"replies": "cut"},
    "huge": {"replies": "huge"},
}


@pytest.fixture
def broken(make_stack, folder):
    """broken(faults) -> a service whose node's VMM has them. One for each test: a host whose starts fail is given work with pauses."""
    return lambda faults: make_stack(node={**node_with(folder, **faults), "boot_timeout_ms": 12000})


@pytest.mark.parametrize("name", FAULTS)
def test_a_vmm_that_does_not_behave(broken, name):
    """The run fails as a start that failed, with a reason, for nothing; nothing is left on the host."""
    stack = broken(FAULTS[name])
    client = stack.client()
    run = client.settled(client.create(prompt=turns(say("never said")))["id"], 120)
    events = client.events(run["id"])
    check_timeline(run, events)
    assert run["status"] == "failed" and run["error"]["code"] in ("vm_start_failed", "vm_boot_timeout"), run["error"]
    assert run["error"]["message"] and run["cost_micros"] == 0
    stack.node.clean()


@pytest.mark.guest
@pytest.mark.parametrize("kind", ("flood", "garbage", "cut"))
def test_events_are_hints(broken, kind):
    """Whatever the event monitor says, a guest that answers is served or its VM ended by reason; a flood does not grow anything."""
    stack = broken({"events": kind})
    client = stack.client()
    run = client.settled(client.create(prompt=turns(shell("true"), say("done")))["id"], 120)
    check_timeline(run, client.events(run["id"]))
    assert run["status"] == "succeeded" or run["error"]["code"] in ("vm_start_failed", "vm_crashed", "worker_protocol_error"), run["error"]
    stack.node.clean()


@pytest.mark.guest
def test_a_guest_that_reboots_in_place(broken):
    """The same VMM boots the guest again: the run ends, and no second guest gets it."""
    stack = broken({"reboot-after-ms": 6000})
    client = stack.client()
    made = client.create(prompt=turns(shell("sleep 100"), say("never said")))
    run = client.settled(made["id"], 120)
    check_timeline(run, client.events(run["id"]))
    assert run["status"] == "failed" and run["error"]["code"] in ("vm_crashed", "vm_start_failed", "vm_boot_timeout"), run["error"]
    stack.node.clean()
