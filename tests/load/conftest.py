"""The load tests use the fixtures of tests/rig/fixtures.py, with the programs of the release build."""
import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "rig"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from fixtures import *  # noqa: E402,F401,F403


@pytest.fixture
def load_stack(cluster, image):
    """load_stack(max_vms=N): controld and one node of the build that is shipped, logs as an operator has them."""
    import control
    import fixtures
    import node
    made, bin_dir = [], os.environ.get("EPHEMERAL_RELEASE_BIN", str(fixtures.TOP / "build" / "release" / "bin"))

    def make(max_vms):
        stack = fixtures.Stack(control.Control(cluster, bin_dir, log_level="info"), None)
        made.append(stack)
        stack.node = node.Node(stack.control, bin_dir, image, max_vms=max_vms, max_concurrent_boots=2, memory_mib=1024 * max_vms, vcpus=2 * max_vms,
                               boot_timeout_ms=180_000, log_level="info").start()  # a slow machine is no fault of ours
        return stack

    yield make
    for stack in made:
        stack.close()


@pytest.fixture
def report(request):
    """report(text...): figures on the terminal, whatever becomes of the test, and in var/tests/load-report.txt."""
    def out(*texts):
        text = "\n".join(texts) + "\n"
        folder = os.environ.get("EPHEMERAL_TEST_LOGS")
        if folder:
            with open(f"{folder}/load-report.txt", "a", encoding="utf-8") as file:
                file.write(f"{request.node.name}{text}")
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(text, flush=True)
    return out
