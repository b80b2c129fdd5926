"""noded's cgroup code on a host whose hierarchy is version 2 alone. The host of the tests need not be one: a guest is, and
tests/rig/cgroup_guest.c in the agent's place asks the code there, case by case."""
import pathlib
import subprocess

import pytest
from fixtures import count
from guest_host import Guest

TOP = pathlib.Path(__file__).resolve().parents[2]
CASES = {
    # where noded is started
    "pure", "true-root", "parent", "parent-with-processes", "service", "service-without-delegation", "service-with-half", "session", "container",
    "container-with-parent", "part-of-the-hierarchy",
    # one group
    "memory", "pids", "pids-above", "cpu", "kill-by-descriptor", "adopt", "each", "forget",
}


@pytest.mark.guest
def test_pure_version_2(bin_dir, tmp_path):
    base = subprocess.run([TOP / "deploy/guest-image/build", "--quiet"], capture_output=True, text=True, timeout=900, check=True).stdout.split()[-1]
    program = pathlib.Path(bin_dir).parent / "tests" / "rig" / "cgroup_guest"
    subprocess.run([TOP / "deploy/guest-image/pack", "--image", base, "--agent", program, "--out", tmp_path], capture_output=True, timeout=60, check=True)
    count("guests", 1)
    with Guest(tmp_path, memory_mib=256) as guest:
        guest.sock.settimeout(100)
        said = guest.sock.makefile("r", encoding="utf-8", errors="replace").read().splitlines()
        guest.wait_exit(20)
    results = {line.split()[1]: line.split(maxsplit=2)[2] for line in said if line.startswith("case ")}
    assert results == dict.fromkeys(CASES, "ok")
    assert said[-1] == "end" and len(said) == len(CASES) + 1
