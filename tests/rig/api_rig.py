"""What the tests of the API share: a control plane without a host, a node on paper, clients, the shape of an error, the route table, and
clients that send bytes instead of requests."""
import collections
import os
import pathlib
import re
import socket
import subprocess

import pytest
from paper_node import PaperNode

import control as control_rig


@pytest.fixture(scope="module")
def control(cluster, bin_dir):
    with control_rig.Control(cluster, bin_dir) as made:
        yield made


@pytest.fixture(scope="module")
def paper(control):
    node = PaperNode(control.conninfo)
    yield node
    node.close()


@pytest.fixture
def client(control, paper):
    return control.new_client()


@pytest.fixture
def admin_cli(control, bin_dir, tmp_path):
    """admin_cli(words..., expect=0): `ephemeral admin …` with the operator's key; returns what it printed."""
    def run(*words, expect=0):
        done = subprocess.run([f"{bin_dir}/ephemeral", "admin", *words], capture_output=True, text=True, timeout=60, check=False,
                              env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "EPHEMERAL_OPERATOR_URL": control.operator_url,
                                   "EPHEMERAL_OPERATOR_KEY": control.operator_key})
        assert done.returncode == expect, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr
    return run


def problem(answer, status, kind, *pointers):
    """Checks the whole shape of an error; returns it."""
    assert answer.status_code == status, f"{answer.status_code} {answer.text[:1000]}"
    assert answer.headers["Content-Type"] == "application/problem+json"
    body = answer.json()
    assert body["type"].startswith("http") and body["type"].endswith(f"/problems/{kind}"), body
    assert body["status"] == status and body["title"] and body["detail"], body
    assert body["request_id"] == answer.headers["Request-Id"]
    if pointers:
        assert [e.get("pointer") or e.get("parameter") or e.get("header") for e in body["errors"]] == list(pointers), body
        assert all(e["detail"] for e in body["errors"])
    return body


# --- the route table ---------------------------------------------------------------------------------------------------------------------

Route = collections.namedtuple("Route", "method pattern listener need body content query handler")
ROW = re.compile(r'^\tROUTE\(HTTP_(\w+),\s*"([^"]+)",\s*LISTENER_(\w+),\s*NEED_(\w+),\s*(\w+),\s*CONTENT_(\w+),\s*"([^"]*)",\s*(\w+)\)', re.M)


def routes():
    """Every row of controld/api/routes.c, so that no test can forget one."""
    text = (pathlib.Path(__file__).resolve().parents[2] / "controld" / "api" / "routes.c").read_text()
    found = [Route(*row) for row in ROW.findall(text)]
    assert len(found) == text.count("\tROUTE(") > 30
    return found


KINDS = {"runs": "run", "keys": "key", "members": "mem", "orgs": "org", "nodes": "node"}


def filled(pattern, **values):
    """The path of a pattern; what is not given is an id or a name that nothing has."""
    parts = pattern.split("/")
    for i, part in enumerate(parts):
        if part.startswith("{"):
            name = part.strip("{}.")
            nothing = "0" * 64 if name == "hash" else "nothing"
            parts[i] = values.get(name) or (f"{KINDS[parts[i - 1]]}_{'0' * 32}" if parts[i - 1] in KINDS else nothing)
    return "/".join(parts)


# --- bytes -------------------------------------------------------------------------------------------------------------------------------


def connect(control, seconds=10, listener="api", **options):
    """A raw connection; options are SO_… of the socket."""
    host, port = control.addresses[listener].rsplit(":", 1)
    s = socket.socket()
    for name, number in options.items():
        s.setsockopt(socket.SOL_SOCKET, getattr(socket, name), number)
    s.settimeout(seconds)
    s.connect((host, int(port)))
    return s


def read_all(s):
    """What comes until the server closes, or until nothing came for the socket's timeout; and which of both."""
    got = b""
    while True:
        try:
            more = s.recv(65536)
        except TimeoutError:
            return got, False
        except (ConnectionResetError, BrokenPipeError):
            return got, True
        if not more:
            return got, True
        got += more


def rss_kib(process):
    """Memory of a process that is there and not shared with a file: what grows when something is kept."""
    with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
