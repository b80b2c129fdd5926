"""Fixtures of the end-to-end, load and deploy tests. A worker shares one control plane and one node between its tests; each test has an
organization of its own. A test that changes the configuration or kills things starts its own (fixture `make_stack`)."""
import os
import pathlib

import pytest

import control as control_rig
import node as node_rig
import pg

LOGS = os.environ.get("EPHEMERAL_TEST_LOGS")
TOP = pathlib.Path(__file__).resolve().parents[2]


def pytest_configure(config):
    config.addinivalue_line("markers", "guest: boots at least one guest")


def count(name, number):
    """Adds to one of the counters that tests/run compares at the end."""
    if LOGS:
        with open(f"{LOGS}/{name}", "a", encoding="ascii") as out:
            out.write(f"{number}\n")


@pytest.fixture(scope="session")
def bin_dir():
    return os.environ.get("EPHEMERAL_BIN", str(TOP / "build" / "asan" / "bin"))


@pytest.fixture(scope="session")
def image():
    return os.environ.get("EPHEMERAL_IMAGE", str(TOP / "var" / "tests" / "image"))


@pytest.fixture(scope="session")
def cluster():
    """The Postgres cluster of this tests/run, or one of our own when a test is started by hand."""
    socket_dir = os.environ.get("EPHEMERAL_TEST_PG")
    if socket_dir:
        yield pg.Running(socket_dir)
        return
    with pg.Cluster(fsync=False) as own:
        yield own


class Stack:
    def __init__(self, control, node):
        self.control, self.node = control, node

    def client(self, **org):
        return self.control.new_client(**org)

    def close(self):
        try:
            if self.node and self.node.process:
                if self.node.keeps_vms():
                    self.node.stop()
                self.node.clean()
        finally:
            if self.node:
                self.node.close()
            count("guests", self.control.guests_booted())
            self.control.close()


@pytest.fixture(scope="session")
def stack(cluster, bin_dir, image):
    control = control_rig.Control(cluster, bin_dir)
    made = Stack(control, node_rig.Node(control, bin_dir, image).start())
    yield made
    made.close()


@pytest.fixture
def make_stack(cluster, bin_dir, image):
    """make_stack(control={...}, node={...}) -> Stack with a configuration of its own."""
    made = []

    def make(control=None, node=None, start_node=True):
        plane = control_rig.Control(cluster, bin_dir, **(control or {}))
        stack = Stack(plane, None)
        made.append(stack)
        if node is not False:
            stack.node = node_rig.Node(plane, bin_dir, image, **(node or {}))
            if start_node:
                stack.node.start()
        return stack

    yield make
    for stack in made:
        stack.close()


@pytest.fixture
def client(stack):
    """A client of a new organization with plenty of credit."""
    return stack.client()


@pytest.fixture(autouse=True)
def claims(request):
    if request.node.get_closest_marker("guest"):
        count("guest-claims", 1)
    yield
