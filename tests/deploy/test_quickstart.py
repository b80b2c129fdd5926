"""deploy/quickstart as a newcomer runs it: a copy of the tree in a directory of mode 0700, first start, second start, down."""
import json
import os
import pathlib
import shutil
import socket
import subprocess

import pytest
import requests
from client import check_timeline

TOP = pathlib.Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    home = tmp_path_factory.mktemp("clone")
    home.chmod(0o700)
    tree = home / "ephemeral"
    files = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=TOP, capture_output=True, check=True).stdout
    for name in filter(None, files.decode().split("\0")):
        if (TOP / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / name, tree / name)
    # The release build is reused: building is tested by every other kind.
    shutil.copytree(TOP / "build" / "release" / "bin", tree / "build" / "release" / "bin", dirs_exist_ok=True)
    yield tree
    subprocess.run([tree / "deploy" / "quickstart", "down"], cwd=tree, check=False, timeout=120, env=environment(tree))


def environment(tree):
    return dict(os.environ, HOME=str(tree.parent), XDG_CONFIG_HOME=str(tree.parent / "config"), NO_COLOR="1")


def start(tree, *arguments, seconds=900):
    return subprocess.run([tree / "deploy" / "quickstart", *arguments], cwd=tree, capture_output=True, text=True, timeout=seconds, env=environment(tree),
                          check=False)


@pytest.mark.timeout(1200)
def test_first_second_and_down(clone):
    address = f"127.0.0.1:{free_port()}"
    first = start(clone, "--listen", address, "--json", str(clone / "first.json"))
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    made = json.loads((clone / "first.json").read_text())
    assert (clone / "first.json").stat().st_mode & 0o777 == 0o600
    assert set(made) >= {"url", "api_key", "operator_url", "operator_key", "config", "run", "events", "steps"}
    run, events = made["run"], made["events"]
    assert run["status"] == "succeeded", run["error"]
    check_timeline(run, events)
    assert run["cost_micros"] + run["released_micros"] == 40000
    for shown in ("Queued", "microVM ready", "worker started · shell on · web off", "$ pwd; whoami", "microVM destroyed", "charged", "released", made["url"]):
        assert shown in first.stdout, f"{shown!r} is not shown:\n{first.stdout[-4000:]}"
    assert requests.get(made["url"] + "/healthz", timeout=10).status_code == 200

    second = start(clone, "--listen", address, "--json", str(clone / "second.json"), seconds=60)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    again = json.loads((clone / "second.json").read_text())
    assert again["api_key"] == made["api_key"] and again["run"]["id"] != run["id"]
    status = start(clone, "status", "--json", seconds=30)
    assert status.returncode == 0 and set(json.loads(status.stdout)) == {"url", "api_key", "operator_url", "operator_key", "config"}

    down = start(clone, "down", seconds=120)
    assert down.returncode == 0, down.stdout + down.stderr
    with pytest.raises(requests.ConnectionError):
        requests.get(made["url"] + "/healthz", timeout=5)
    assert start(clone, "down", seconds=60).returncode == 0, "a second down has nothing to do and says so"
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            assert str(clone) not in command, f"left running: {entry.name} {command}"


def test_unknown_option_and_help(clone):
    assert start(clone, "--help", seconds=20).returncode == 0
    wrong = start(clone, "--frobnicate", seconds=20)
    assert wrong.returncode == 2 and "--frobnicate" in wrong.stderr + wrong.stdout
