"""500 followers of the timelines of 50 runs at once: each gets every event once, byte for byte, and controld pays little for them."""
import asyncio
import os
import threading

import pytest
from client import say, shell, turns
from sampler import MIB, footprint

import wait

RUNS, EACH = int(os.environ.get("EPHEMERAL_LOAD_FOLLOWED", "50")), 10


def unchunk(data):
    """The body of a chunked answer that ended well."""
    body, at = bytearray(), 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if size == 0:
            return bytes(body)
        body += data[end + 2:end + 2 + size]
        at = end + 4 + size


def items(body):
    """(id, data) of each event of a stream."""
    found = []
    for block in body.split(b"\n\n"):
        fields = dict(line.partition(b": ")[::2] for line in block.split(b"\n") if line and not line.startswith(b":"))
        if b"data" in fields:
            found.append((int(fields[b"id"]), fields[b"data"]))
    return found


class Followers:
    """All followers, in one loop of a thread of their own."""

    def __init__(self, client, runs):
        host, _, port = client.url.removeprefix("http://").partition(":")
        self.host, self.port, self.client, self.open = host, int(port), client, 0
        self.wanted = [run for run in runs for _ in range(EACH)]
        self.streams = {run: [] for run in runs}
        self.thread = threading.Thread(target=lambda: asyncio.run(self.all()), daemon=True)
        self.thread.start()

    async def follow(self, run):
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 22)
        writer.write(f"GET /v1/runs/{run}/events HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.client.key}\r\n"
                     "Accept: text/event-stream\r\nConnection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"chunked" in head, head
        self.open += 1
        self.streams[run].append(items(unchunk(await reader.read(-1))))
        writer.close()

    async def all(self):
        self.errors = [e for e in await asyncio.gather(*map(self.follow, self.wanted), return_exceptions=True) if e]


@pytest.mark.guest
@pytest.mark.timeout(1500)
def test_followers(load_stack, report):
    stack = load_stack(max_vms=8)
    client = stack.client()
    before, _ = footprint(stack.control.process.pid)
    prompt = turns(shell("for i in 1 2 3 4 5; do echo line $i; sleep 0.1; done"), say("done"))
    stack.control.drain(stack.node.name)  # nothing begins before all follow
    runs = [client.create(prompt=prompt)["id"] for _ in range(RUNS)]
    followers = Followers(client, runs)
    wait.until(lambda: followers.open == RUNS * EACH or not followers.thread.is_alive(), 60, "every follower to be connected")
    during, descriptors = footprint(stack.control.process.pid)
    assert descriptors >= RUNS * EACH
    stack.control.undrain(stack.node.name)
    for run in runs:
        assert client.settled(run, 900)["status"] == "succeeded"
    followers.thread.join(30)
    assert not followers.thread.is_alive() and not followers.errors, followers.errors[:5]
    for run in runs:
        stored = [(seq, data) for seq, data, _ in stack.control.event_rows(run)]
        assert len(followers.streams[run]) == EACH
        for stream in followers.streams[run]:
            assert stream == stored, f"{run}: what a follower got is not what is stored"
    wait.until(lambda: footprint(stack.control.process.pid)[1] < 100, 20, "the followers' descriptors to be closed")
    after, _ = footprint(stack.control.process.pid)
    report(f"\n  {RUNS * EACH} followers of {RUNS} runs: controld {before / MIB:.1f} MiB before, {during / MIB:.1f} MiB with all connected "
           f"({(during - before) / RUNS / EACH / 1024:.1f} KiB each), {after / MIB:.1f} MiB after")
    assert (during - before) / (RUNS * EACH) < 64 * 1024
    stack.node.clean()
    stack.control.check_ledger()
