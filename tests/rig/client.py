"""A small client of the public API, for tests: plain requests, no help from our own code."""
import hashlib
import json

import requests

import wait

ENDS = ("succeeded", "failed", "cancelled", "timed_out", "interrupted")


def turns(*list_of_turns, note=""):
    """A prompt that gives the scripted provider its turns (controld/scripted/README.md)."""
    return f"{note}\n```turns\n{json.dumps(list(list_of_turns))}\n```\n"


def shell(command, **arguments):
    """One scripted turn that runs one command."""
    return {"tool_calls": [{"name": "shell", "arguments": dict(command=command, **arguments)}]}


def say(text, **more):
    return dict(text=text, **more)


class Client:
    def __init__(self, url, key):
        self.url, self.key = url, key
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.headers["Authorization"] = f"Bearer {key}"

    def call(self, method, path, expect=None, **kwargs):
        kwargs.setdefault("timeout", 90)
        answer = self.session.request(method, self.url + path, **kwargs)
        if expect is not None:
            assert answer.status_code == expect, f"{method} {path}: {answer.status_code} {answer.text[:2000]}"
        return answer

    def get(self, path, expect=200, **kwargs):
        return self.call("GET", path, expect, **kwargs).json()

    def create(self, expect=201, headers=None, **fields):
        """POST /v1/runs; fields default to a small shell run with the scripted model."""
        body = {"shell": True, "timeout_seconds": 120, "max_cost_micros": 1_000_000}
        body.update(fields)
        body = {name: value for name, value in body.items() if value is not None}
        answer = self.call("POST", "/v1/runs", expect, json=body, headers=headers)
        return answer.json()

    def run(self, prompt, seconds=120, **fields):
        """Creates a run and waits for its settled end."""
        return self.settled(self.create(prompt=prompt, **fields)["id"], seconds)

    def read(self, run_id):
        return self.get(f"/v1/runs/{run_id}")

    def settled(self, run_id, seconds=120):
        def ended():
            run = self.get(f"/v1/runs/{run_id}/wait?timeout_seconds=20")
            return run if run["status"] in ENDS and run["cost_final"] else None
        try:
            return wait.until(ended, seconds, f"the settled end of {run_id}")
        except AssertionError as error:
            last = [(event["t"], event["type"], event["data"]) for event in self.events(run_id)[-5:]]
            raise AssertionError(f"{error}; it is {self.read(run_id)['status']}, and its last events are {last}") from error

    def events(self, run_id, after=0):
        """All events as parsed objects, through as many pages as it takes."""
        found = []
        while True:
            page = self.get(f"/v1/runs/{run_id}/events?after={after}&limit=500")
            found += page["data"]
            if not page["next_cursor"] or not page["data"]:
                return found
            after = page["data"][-1]["seq"]

    def event(self, run_id, kind, seconds=60):
        """Waits for the first event of a type."""
        return wait.until(lambda: next((e for e in self.events(run_id) if e["type"] == kind), None), seconds, f"event {kind} of {run_id}")

    def cancel(self, run_id, expect=(200, 202)):
        answer = self.call("POST", f"/v1/runs/{run_id}/cancel")
        assert answer.status_code in expect, answer.text
        return answer.json()

    def stream(self, run_id, last_id=None, seconds=120):
        """Yields (id, event type, data bytes) of the SSE stream until it ends."""
        headers = {"Accept": "text/event-stream"}
        if last_id is not None:
            headers["Last-Event-ID"] = str(last_id)
        answer = self.session.get(f"{self.url}/v1/runs/{run_id}/events", headers=headers, stream=True, timeout=seconds)
        with answer:
            assert answer.status_code == 200, answer.text
            fields = {}
            for line in answer.iter_lines(chunk_size=1):
                if line:
                    name, _, value = line.partition(b": ")
                    if name:
                        fields[name] = value
                elif b"data" in fields:
                    yield int(fields[b"id"]), fields[b"event"].decode(), fields[b"data"]
                    fields = {}


# How control itself ends a run whose host did not say that the VM is gone (controld/migrations/0013, the sweeps and eph_finish).
FENCED_BEFORE_DESTROYED = (
    "The host stopped answering during the run.",
    "The host was revoked during the run.",
    "The host does not know this run any more.",
    "The host did not end the run at its timeout.",
    "The run was cancelled; its host did not confirm that the microVM is destroyed.",
    "The host reported an end without having destroyed the microVM.",
)


def check_timeline(run, events, fenced=True):
    """What holds for the timeline and the money of every settled run. fenced=False: its host was there all the time, so it was not given up."""
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1)), "seq is not dense"
    assert all(e["run_id"] == run["id"] for e in events)
    times = [e["t"] for e in events]
    assert times == sorted(times), "t goes back"
    assert events[0]["type"] == "run.queued" and events[0]["data"]["reserved_micros"] == run["reserved_micros"]
    assert events[-1]["type"] == "run.settled"
    assert events[-2]["type"] == "run." + run["status"]
    ready = [e for e in events if e["type"] == "microvm.ready"]
    destroyed = [i for i, e in enumerate(events) if e["type"] == "microvm.destroyed"]
    # Exactly one microvm.destroyed for a VM that was ready, none for any other; unless control gave its host up before it could say so.
    silent = run["error"] is not None and run["error"]["message"] in FENCED_BEFORE_DESTROYED
    assert len(ready) <= 1 and (fenced or not silent)
    assert len(destroyed) == (0 if silent else len(ready)), f"{len(ready)} VMs ready, {len(destroyed)} destroyed: {run['error']}"
    if destroyed:
        assert all(e["source"] == "control" for e in events[destroyed[0] + 1:]), "a host's event after microvm.destroyed"
    money = events[-1]["data"]
    assert money["charged_micros"] == run["cost_micros"] and money["released_micros"] == run["released_micros"]
    assert run["cost_micros"] + run["released_micros"] == run["reserved_micros"]
    assert sum(run["cost"].values()) == run["cost_micros"], run["cost"]
    assert 0 <= run["cost_micros"] <= run["max_cost_micros"]
    if run["status"] == "succeeded":
        assert run["error"] is None
    else:
        assert run["error"]["code"] and run["error"]["message"] and run["error"]["remedy"]


def output_of(events, call_id=None):
    """What commands printed, both streams, as text."""
    return "".join(e["data"].get("text", "") for e in events if e["type"] == "shell.output" and call_id in (None, e["data"]["call_id"]))


def check_chain(rows):
    """rows: (seq, bytes, hash) of a run in order, as stored."""
    before = bytes(32)
    for seq, data, stored in rows:
        before = hashlib.sha256(before + bytes(data)).digest()
        assert before == bytes(stored), f"the hash of event {seq} does not follow from the one before"
        assert json.loads(bytes(data))["seq"] == seq
