"""A node whose VMs are Cloud Hypervisor's: a VMM that hangs, fails, lies, floods or dies at each step of its start, one that is none, and what
the driver asks of a good one. With the stand-in (tests/rig/cloud-hypervisor), whose faults no real one has."""
import json
import pathlib
import shutil
import subprocess

import pytest
import vmm_rig
import wait
from client import say, shell, turns

PROMPT = turns(shell("cat /proc/sys/kernel/random/boot_id; nproc"), say("All done."))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the stand-in of this file's node lies, which a jail has to reach."""
    folder = tmp_path_factory.mktemp("vmm")
    for parent in [folder, *folder.parents][:3]:
        parent.chmod(0o755)
    return folder


@pytest.fixture
def faulty(make_stack, place):
    """faulty(hang="create") -> (stack, requests): a node whose stand-in does that."""
    logs = []

    def make(stack=None, boot_timeout_ms=16000, **faults):
        for old in ("log.sock",):
            (place / old).unlink(missing_ok=True)
        log = vmm_rig.Log(place)
        logs.append(log)
        config = vmm_rig.node_config(place, {name.replace("_", "-"): value for name, value in faults.items()})
        stack = make_stack(node={**config, "boot_timeout_ms": boot_timeout_ms})
        return stack, log

    yield make
    for log in logs:
        log.close()


def calls(log):
    return [path.rsplit("/", 1)[1] for _, path, _ in log.requests()]


@pytest.mark.guest
def test_a_good_one(faulty):
    """What it is asked, in this order and nothing else, by bodies that the published description allows; then a run on it. Events that flood, are cut
    or are none change nothing."""
    stack, log = faulty(events="flood")
    run = stack.client().run(PROMPT)
    assert run["status"] == "succeeded", run["error"]
    requests = log.requests()
    assert [(method, path) for method, path, _ in requests] == [("GET", "/api/v1/vmm.ping"), ("PUT", "/api/v1/vm.create"), ("GET", "/api/v1/vm.info"),
                                                               ("PUT", "/api/v1/vm.boot")]
    config = json.loads(requests[1][2])
    assert config["cpus"]["nested"] is False and config["memory"]["thp"] is False and config["disks"][0]["image_type"] == "Raw"
    spec = vmm_rig.description()
    for request in requests if spec else ():
        assert not vmm_rig.body_breaches(spec, *request)
    for events in ("garbage", "cut"):
        (pathlib.Path(stack.node.config["cloud_hypervisor"]).parent / "faults").write_text(f"events = {events}\n")
        run = stack.client().run(PROMPT)
        assert run["status"] == "succeeded", run["error"]
    assert calls(log) == ["vmm.ping", "vm.create", "vm.info", "vm.boot"] * 2


@pytest.mark.guest
@pytest.mark.parametrize("fault, word, says, wanted", [
    ("hang", "create", "no answer to vm.create", ["vmm.ping", "vm.create"]),
    ("exit", "create", "exit code 1", ["vmm.ping", "vm.create"]),
    ("info", "differs", "cpus.nested is not as it was asked for", ["vmm.ping", "vm.create", "vm.info"]),
])
def test_bad_ones(faulty, fault, word, says, wanted):
    """Each fault ends the VM and is tried once more on another VMM; then the run says what it was, and has cost nothing."""
    stack, log = faulty(**{fault: word})
    run = stack.client().run(PROMPT)
    assert run["status"] == "failed" and run["error"]["code"] == "vm_start_failed", run["error"]
    assert says in run["error"]["message"]
    assert calls(log) == wanted * 2
    assert run["cost_micros"] == 0


@pytest.mark.guest
def test_one_that_fails_once(faulty, place):
    """A VM that wedges in its boot costs a second VMM, not an attempt: the run succeeds, with one microvm.ready."""
    stack, log = faulty(hang="boot")
    client = stack.client()
    run_id = client.create(prompt=PROMPT)["id"]
    wait.until(lambda: "vm.boot" in calls(log), 60, "the first boot")
    (place / "faults").write_text("")
    run = client.settled(run_id)
    assert run["status"] == "succeeded", run["error"]
    kinds = [e["type"] for e in client.events(run_id)]
    assert kinds.count("microvm.ready") == 1 and kinds.count("microvm.destroyed") == 1


@pytest.mark.guest
def test_a_guest_that_restarts(faulty):
    """In place, which no exit tells: the run ends as crashed within a second, and no second boot gets to its channel."""
    stack, _ = faulty(reboot_after_ms=15000)
    run = stack.client().run(turns(shell("sleep 60"), say("never said")))
    assert run["status"] == "failed" and run["error"]["code"] == "vm_crashed", run["error"]
    assert run["usage"]["model_calls"] >= 1


def test_what_is_none(bin_dir, image, place, tmp_path):
    """A VMM that is too old, no program, half a program, another program, or not there: refused at the start, by name."""
    def says(**config):
        lines = {"state_dir": tmp_path / "state", "run_dir": "/run/eph-no-vmm", "controld": "tls+tcp://127.0.0.1:1", "emulation": "allow", "image_dir": image,
                 "vmm": "cloud-hypervisor", **config}
        (tmp_path / "conf").write_text("".join(f"{k} = {v}\n" for k, v in lines.items()))
        done = subprocess.run([f"{bin_dir}/noded", "--config", str(tmp_path / "conf"), "-t"], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        return done.stderr + done.stdout

    (place / "faults").write_text("version = v52.0\n")
    old = shutil.copy(vmm_rig.stand_in(), place / "old")
    assert "v53 or newer is needed" in says(cloud_hypervisor=old)
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho cloud-hypervisor v53.0\n")
    script.chmod(0o755)
    assert "is no program" in says(cloud_hypervisor=script)
    half = tmp_path / "half"
    half.write_bytes(vmm_rig.stand_in().read_bytes()[:4096])
    half.chmod(0o755)
    assert str(half) in says(cloud_hypervisor=half)
    assert "does not begin with" in says(cloud_hypervisor="/bin/ls")
    assert "No such file" in says(cloud_hypervisor=tmp_path / "nothing")
    assert "without .." in says(cloud_hypervisor=f"{place}/../x")
    assert "not found in PATH" in says(cloud_hypervisor="no-such-vmm")
    assert "emulation = allow" in says(cloud_hypervisor=vmm_rig.stand_in(), emulation="off")
    assert "insecure_no_jail" in says(cloud_hypervisor=vmm_rig.stand_in(), insecure_no_jail="true")
    assert "vmm_files" in says(cloud_hypervisor=vmm_rig.stand_in(), vmm_files="relative/path")
