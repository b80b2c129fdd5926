"""Fixtures of tests/rig/fixtures.py, and a place for figures."""
import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "rig"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from fixtures import *  # noqa: E402,F401,F403


@pytest.fixture
def figures(request):
    """figures(lines...): on the terminal, whatever becomes of the test, and in endure-report.txt beside the logs."""
    def out(*lines):
        text = f"\n{request.node.name}\n" + "".join(f"  {line}\n" for line in lines)
        folder = os.environ.get("EPHEMERAL_TEST_LOGS")
        if folder:
            with open(f"{folder}/endure-report.txt", "a", encoding="utf-8") as file:
                file.write(text)
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(text, flush=True)
    return out
