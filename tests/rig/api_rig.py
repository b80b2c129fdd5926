"""What the tests of the API share: a control plane without a host, a node on paper, clients, and the shape of an error."""
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
