"""The contract tests use the fixtures of tests/rig/fixtures.py."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "rig"))
from fixtures import *  # noqa: E402,F401,F403
