"""What is written about runs: no secret, no prompt, no file, no byte that a guest or client chose, in any log at debug level, in Postgres' log,
in an argument list or environment; one event is one line; and a flood is a few lines."""
import base64
import os
import pathlib
import re
import secrets
import socket

import pytest
import requests
from client import Client, say, shell, turns

import host
import pg
import wait

LINE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (debug|info|warn|error) [a-z/]+: \S")
FORGED = "2026-11-30T00:00:00.000Z error controld: FORGED-LINE"


def canary(name):
    return f"CANARY{name}{secrets.token_hex(12)}"


def forms(secret):
    """The forms in which bytes could stand in a text: as they are, hex, both base64s, without their first and last characters."""
    raw = secret if isinstance(secret, bytes) else secret.encode()
    found = {raw, raw.hex().encode(), base64.b64encode(raw).rstrip(b"=")[:-2], base64.urlsafe_b64encode(raw).rstrip(b"=")[:-2]}
    return {f for f in found if len(f) >= 12}


def pieces(data):
    """The forms of every 24 bytes of a key, and of the keys that a file lists in base64: a part of one would do harm as well."""
    keys = [word for word in data.split() if re.fullmatch(rb"[A-Za-z0-9_-]{43}", word)]
    keys += [base64.urlsafe_b64decode(word + b"=") for word in keys]
    return set().union(*(forms(key[at:at + 24]) for key in keys or [data] for at in range(0, len(key) - 23, 24)))


def search(texts, wanted):
    """(place, name) of every secret that stands in one of the texts (name -> bytes)."""
    return [(place, name) for place, text in texts.items() for name, values in wanted.items() if any(v in text for v in values)]


def read(path):
    return pathlib.Path(path).read_bytes()


def processes_of(stack):
    """pid -> name, of everything that a controld and a node run, also of VMs."""
    found = {stack.control.process.pid: "controld", stack.node.process.pid: "keeper"}
    for role in ("link", "broker", "channel", "vmm"):
        found.update({pid: role for pid in stack.node.role_pids(role)})
    return found


def check_lines(name, data):
    """One event, one line: of our form, valid UTF-8, of bounded length, nothing that moves a cursor."""
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        text = line.decode("utf-8")
        assert LINE.match(text) and len(line) < 4096, (name, number, text[:300])
        assert not re.search("[\x00-\x1f\x7f-\x9f\u2028-\u202e]", text), (name, number, text[:300])
    assert data.endswith(b"\n") or not data


def open_box(stack):
    """What may not be read by others, while a VM lives: argument lists and environments, limits of every process."""
    texts = {}
    for pid, name in processes_of(stack).items():
        for kind in ("cmdline", "environ"):
            texts[f"{kind} of {name}"] = read(f"/proc/{pid}/{kind}")
        limits = read(f"/proc/{pid}/limits").decode()
        core, size = (re.search(rf"Max {what} file size +(\S+) +(\S+)|Max {what} size +(\S+) +(\S+)", limits) for what in ("core", "file"))
        assert set(filter(None, core.groups())) == {"0"}, f"{name} may write a core file"
        if name not in ("controld", "keeper"):  # whose log it is
            assert all(int(limit) <= 1 << 30 for limit in filter(None, size.groups())), f"{name} may fill the disk"
    return texts


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_no_secret_is_written(bin_dir, image):
    import control as control_rig
    import fixtures
    import node as node_rig
    names = {name: canary(name) for name in ("database", "prompt", "file", "filename", "output", "command", "argument", "reply", "modelkey", "userinfo", "refusal", "metadata",
                                             "key", "idempotency", "json", "query", "body", "raw", "console")}
    quickstart = dict(re.findall(r"^\t\t(log_\w+) = (\w+)$", (fixtures.TOP / "deploy/lib/postgres.sh").read_text(), re.M))
    assert quickstart.get("log_error_verbosity") == "terse", "Postgres would write rows, and so prompts, into the DETAIL of an error"
    with pg.Cluster(settings={**quickstart, "log_min_messages": "info"}) as cluster:
        cluster_name = f"t_{secrets.token_hex(6)}"
        conninfo = cluster.create(cluster_name) + f" password={names['database']}"
        control = control_rig.Control(cluster, bin_dir, conninfo=conninfo)
        stack = fixtures.Stack(control, node_rig.Node(control, bin_dir, image, max_vms=4, max_concurrent_boots=2).start())
        node = stack.node
        try:
            join = read(f"{node.home}/join-token").decode().strip() if os.path.exists(f"{node.home}/join-token") else ""
            client = stack.client()
            control.operator("PUT", "/providers/other", json={"base_url": "http://127.0.0.1:9/v1", "api_key": names["modelkey"], "any_address": True})
            control.operator("PUT", "/models/other/one", json={})
            control.operator("PUT", "/prices/other/one", json={"input_micros_per_million": 1, "output_micros_per_million": 1})
            refused = control.operator("PUT", "/providers/userinfo", json={"base_url": f"http://u:{names['userinfo']}@127.0.0.1:9/v1", "api_key": "k"}, expect=(200, 400))
            evil = f"{names['output']}\\n{FORGED}\\033]0;x\\007\\033[2J\\377\\376\\000"
            runs = {
                "shell": {"prompt": turns(shell(f"cat data.txt; printf '{evil}'; printf '{evil}' >&2; echo '<3>{names['console']}' >/dev/kmsg; "
                                                f"echo {names['console']} >/dev/console; echo {names['command']}"), {"tool_calls": [{"name": names["argument"], "arguments": names["argument"]}]},
                                          say(names["reply"]), note=names["prompt"]),
                          "files": [{"path": f"{names['filename']}.d/data.txt", "content": "x"}, {"path": "data.txt", "content": names["file"]}], "metadata": {"note": names["metadata"]}},
                "refused by the model": {"prompt": turns({"http": {"status": 401, "body": {"error": {"message": f"bad key {names['refusal']}\n{FORGED}"}}}}, note=names["prompt"])},
                "nonsense": {"prompt": turns({"raw": f"<html>{names['raw']}\x1b[2J"}, note=names["prompt"])},
                "model not reached": {"prompt": names["prompt"], "model": "other/one"},
                "times out": {"prompt": turns(shell(f"echo {names['command']}; sleep 100"), note=names["prompt"]), "timeout_seconds": 4},
            }
            made = {name: client.create(max_cost_micros=2_000_000, **fields)["id"] for name, fields in runs.items()}
            client.event(made["times out"], "shell.output", 120)
            box = open_box(stack)
            ended = {name: client.settled(run, 120) for name, run in made.items()}
            assert ended["shell"]["status"] == "succeeded" and ended["times out"]["status"] == "timed_out", ended
            # What clients send that is wrong.
            wrong = Client(control.url, names["key"])
            for path, fields in (("/v1/runs", {"data": f'{{"prompt": {names["json"]}'}), ("/v1/runs", {"data": f'{{"{names["body"]}": 1, "prompt": 7, "{names["body"]}\\n{FORGED}": 2}}'}),
                                 (f"/v1/runs?x={names['query']}", {"json": {}}), (f"/v1/{names['query']}%0a{FORGED}", {"json": {}}), ("/v1/runs", {"data": b"\xff\xfe" + names["json"].encode()})):
                for who in (client, wrong):
                    answer = who.call("POST", path, headers={"Content-Type": "application/json", "Idempotency-Key": names["idempotency"]}, **fields)
                    assert 400 <= answer.status_code < 500
            requests.get(f"{control.url}/v1/me", auth=("user", names["key"]), timeout=10)
            requests.get(f"{control.url}/v1/me?key={client.key}", timeout=10)
            # Errors of Postgres, with rows and parameters at hand: a constraint that no new run can keep, then no Postgres at all.
            db = cluster.admin(cluster_name)
            db.cursor().execute("ALTER TABLE runs ADD CONSTRAINT never CHECK (false) NOT VALID")
            failed = client.call("POST", "/v1/runs", json={"prompt": names["prompt"], "metadata": {"note": names["metadata"]}})
            assert failed.status_code in (500, 503) and names["prompt"] not in failed.text, failed.text
            db.cursor().execute("ALTER TABLE runs DROP CONSTRAINT never")
            db.close()
            cluster.stop_server()
            assert client.call("POST", "/v1/runs", json={"prompt": names["prompt"]}).status_code in (500, 503)
            cluster.start_server()
            control.until_ready()
            node.clean()
            wanted = {name: forms(value) for name, value in names.items()}
            secret = {"API key": client.key, "operator key": control.operator_key, "model's bearer": control.scripted_token, "join token": join.split(".")[0]}
            wanted.update({name: forms(value) for name, value in secret.items()})
            wanted.update({"keyring": pieces(read(control.config["keyring"])), "node's key": pieces(read(f"{node.state_dir}/identity.key"))})
            assert all(wanted.values()), "nothing to search for"
            wanted["forged line"] = {b"\n" + FORGED.encode()}
            wanted["escape"] = {b"\x1b", b"\x07"}
            texts = {"controld's log": read(control.log), "noded's log": read(node.log), "Postgres' log": read(cluster.log), **box}
            # The search finds what is there: each form of each, planted in a text of each kind.
            for name, values in wanted.items():
                for value in values:
                    assert search({"planted": texts["noded's log"][:5000] + b"x" + value + b"y\n"}, {name: values}) == [("planted", name)]
            assert b"debug" in texts["controld's log"] and b"noded/broker" in texts["noded's log"] and b"noded/channel" in texts["noded's log"], "not at debug level"
            assert b"ERROR" in texts["Postgres' log"] and b"never" in texts["Postgres' log"], "no statement failed"
            assert len(box) >= 2 * 6, box.keys()
            assert search(texts, wanted) == []
            # On the host's disk: no key of anybody in spools and journals (a run's own record may hold its output).
            disk = {str(path): read(path) for path in pathlib.Path(node.state_dir).rglob("*") if path.is_file() and path.name != "identity.key"}
            assert search(disk, {name: wanted[name] for name in ("API key", "operator key", "model's bearer", "modelkey", "node's key", "database", "keyring") if name in wanted}) == []
            check_lines("controld", texts["controld's log"])
            check_lines("noded", texts["noded's log"])
            assert not refused or "userinfo" not in str(refused)
            assert host.leftovers(node) == []
        finally:
            # The cluster goes with its databases, so the stack is closed inside.
            control.database = None
            stack.close()


# --- floods ---------------------------------------------------------------------------------------------------------------------------------


def flood(address, request, count):
    """Sends a request `count` times over a few connections, pipelined, reading what comes back; the peer may close whenever it wants."""
    name, port = address.rsplit(":", 1)
    left = count
    while left > 0:
        with socket.create_connection((name, int(port)), timeout=10) as peer:
            batch = min(left, 50)
            try:
                peer.sendall(request * batch)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(1 << 20):
                    pass
            except OSError:
                pass
            left -= batch


@pytest.mark.parametrize("level", ["info", "debug"])
@pytest.mark.timeout(300)
def test_a_flood_is_a_few_lines(cluster, bin_dir, level):
    """10,000 bad requests of several kinds, at every listener: bounded lines, a count of the rest, and the service goes on."""
    import control as control_rig
    kinds = [b"GET /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n", b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
             b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n{{{", b"\x00\xff nonsense\r\n\r\n"]
    with control_rig.Control(cluster, bin_dir, log_level=level) as control:
        before = len(control.log_text().splitlines())
        for listener in ("api", "operator"):
            for request in kinds:
                flood(control.addresses[listener], request, 1125)
        flood(control.addresses["scripted"], b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nContent-Length: 2\r\n\r\n{}", 500)
        link = re.sub(r"^.*//", "", control.addresses["link"])
        for _ in range(10):
            flood(link, b"\x16\x03\x01\x00\x05nonsense", 50)
        assert requests.get(f"{control.url}/healthz", timeout=10).status_code == 200
        lines = control.log_text().splitlines()[before:]
        # info: nobody's mistake is news. debug: a line a request, up to the allowance of that place (200 x 20, then 10 x 20 a second).
        assert len(lines) < (1000 if level == "info" else 9000), len(lines)
        assert control.log.stat().st_size < 2_000_000
        check_lines("controld", control.log.read_bytes())
        if level == "debug":
            def said():
                requests.get(f"{control.url}/healthz", timeout=10)
                return re.search(r"log: (\d+) more suppressed in \d+ s, like: request req=", control.log_text())
            assert int(wait.until(said, 60, "the count of lines that were left out", every=0.2).group(1)) > 100
