#!/usr/bin/python3
"""Boots a packed guest in QEMU and speaks the host's side of the guest channel (proto/guest.h), with a scripted model.

For tests of guest-agent alone: no broker, no channel process, no money. A test says what the model replies and looks at what the
agent asked, put on the timeline and answered. Runs in the test's process; every wait has a deadline. By hand:

    tests/rig/guest_host.py --image DIR 'pwd; whoami' 'curl -sS https://example.com'
"""

import argparse
import collections
import ctypes
import json
import mmap
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time

PROBE, SETUP, SETUP_FILE, SETUP_END, REPLY_DATA, REPLY_END, STOP = range(1, 8)
CREDIT = 32
HELLO, SETUP_ACK, CALL_DATA, CALL_END, EVENT, RESULT_DATA, RESULT_END, FATAL = range(64, 72)
SHELL_STARTED, SHELL_OUTPUT, SHELL_EXITED, TOOL_CALLED, NOTE = range(1, 6)
BODY_MAX = 65531
START_CREDIT = 256 * 1024
TOOLS = ("shell", "read_file", "write_file", "list_files")
ROLES = {1: "system", 2: "user", 3: "assistant", 4: "tool"}
FINISH = {"stop": 1, "tool_calls": 2, "length": 3, "content_filter": 4, "other": 5}

Event = collections.namedtuple("Event", "kind call_id text stream name path bytes has_signal timed_out code duration_ms "
                               "cut_bytes at")
ToolCall = collections.namedtuple("ToolCall", "id name arguments")
Message = collections.namedtuple("Message", "role content tool_call_id calls")


class GuestError(Exception):
    """The guest broke the protocol, ended, or did not answer in time."""


def put_str(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<I", len(data)) + data


class Reader:
    """Reads a message; every byte must be consumed."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        if self.at + n > len(self.data):
            raise GuestError("a message is shorter than its fields say")
        self.at += n
        return self.data[self.at - n:self.at]

    def num(self, fmt):
        return struct.unpack("<" + fmt, self.take(struct.calcsize("<" + fmt)))[0]

    def blob(self):
        return self.take(self.num("I"))

    def text(self):
        return self.blob().decode()

    def end(self):
        if self.at != len(self.data):
            raise GuestError(f"{len(self.data) - self.at} bytes too many in a message")


def decode_event(data, at):
    r = Reader(data)
    kind, call_id, text, stream = r.num("B"), r.text(), r.blob(), r.num("B")
    event = Event(kind, call_id, text, stream, r.text(), r.text(), r.num("q"), bool(r.num("B")), bool(r.num("B")),
                  r.num("i"), r.num("I"), r.num("Q"), at)
    r.end()
    return event


def decode_call(data):
    r = Reader(data)
    if r.num("B") != 1:
        raise GuestError("a call of an unknown kind")
    number, _, tools, count = r.num("I"), r.num("I"), r.num("I"), r.num("I")
    messages = []
    for _ in range(count):
        role, content, tool_call_id = ROLES[r.num("B")], r.text(), r.text()
        calls = [ToolCall(r.text(), r.text(), r.text()) for _ in range(r.num("I"))]
        messages.append(Message(role, content, tool_call_id, calls))
    r.end()
    return number, {name for i, name in enumerate(TOOLS) if tools >> i & 1}, messages


def encode_reply(number, content="", calls=(), finish=None, failed=None, left=99):
    finish = finish or ("tool_calls" if calls else "stop")
    out = struct.pack("<BIB", 1, number, 2 if failed else 1) + put_str(failed or "")
    out += struct.pack("<B", FINISH[finish]) + put_str(content) + struct.pack("<I", len(calls))
    for call in calls:
        out += put_str(call[0]) + put_str(call[1]) + put_str(call[2])
    return out + struct.pack("<I", left)


def tsc_khz():
    """Frequency of the time stamp counter; the guest cannot calibrate it under emulation and would hang."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\x0f\x31\x48\xc1\xe2\x20\x48\x09\xd0\xc3")  # rdtsc; rdx:rax -> rax; ret
    rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    clock = time.CLOCK_MONOTONIC_RAW

    def sample():
        """Both counters at one time: of many tries the one that was interrupted least."""
        tries = [(time.clock_gettime_ns(clock), rdtsc(), time.clock_gettime_ns(clock)) for _ in range(100)]
        before, count, after = min(tries, key=lambda t: t[2] - t[0])
        return (before + after) // 2, count

    t0, c0 = sample()
    while time.clock_gettime_ns(clock) - t0 < 50_000_000:
        pass
    t1, c1 = sample()
    return (c1 - c0) * 1_000_000 // (t1 - t0)


_khz = None


def qemu_argv(image, memory_mib, fd):
    global _khz
    _khz = _khz or tsc_khz()
    append = (f"quiet tsc_early_khz={_khz} cryptomgr.notests random.trust_cpu=on mitigations=off nokaslr rcupdate.rcu_expedited=1 "
              "audit=0 apparmor=0 panic=-1 reboot=t eph.channel=virtio:ephemeral.0")
    accel = os.environ.get("EPHEMERAL_TEST_ACCEL") or "tcg,thread=multi"
    return [shutil.which("qemu-system-x86_64") or "qemu-system-x86_64", "-M", "microvm,isa-serial=off,pit=off,pic=off",
            "-accel", accel, "-cpu", "host" if accel == "kvm" else "Nehalem,+rdrand", "-smp", "1", "-m", f"{memory_mib}M",
            "-nodefaults", "-no-user-config", "-nographic", "-no-reboot",
            "-kernel", f"{image}/vmlinux", "-initrd", f"{image}/initramfs.cpio", "-append", append,
            "-device", "virtio-serial-device", "-chardev", f"socket,id=ch,fd={fd}",
            "-device", "virtserialport,chardev=ch,name=ephemeral.0",
            "-drive", f"id=root,file={image}/rootfs.sqfs,format=raw,if=none,readonly=on,file.locking=off",  # Cloud Hypervisor locks what it reads
            "-device", "virtio-blk-device,drive=root"]


class Guest:
    """One booted guest. Use as a context manager: at its end the machine is gone."""

    def __init__(self, image, memory_mib=512, deadline=60.0):
        self.events, self.fatal, self.result = [], None, None
        self.deadline = deadline          # seconds that any single wait may take
        self.give_event_credit = True     # False: let the guest run out of credit on its events
        self.withheld = 0                 # event bytes not given back yet
        self._in, self._calls, self._result = b"", {}, b""
        self._call_ready = collections.deque()
        self._credit = collections.defaultdict(lambda: START_CREDIT)
        self._frames = collections.deque()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.sock = ours
        self.started = time.monotonic()
        self.process = subprocess.Popen(qemu_argv(image, memory_mib, theirs.fileno()), pass_fds=[theirs.fileno()],
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        theirs.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.sock.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    # --- frames

    def send(self, kind, stream=0, body=b""):
        self.send_raw(struct.pack("<IBI", len(body) + 5, kind, stream) + body)

    def send_raw(self, data):
        end = time.monotonic() + self.deadline
        while data:
            try:
                data = data[self.sock.send(data):]
            except BlockingIOError:
                self.pump(0.05)
                if time.monotonic() > end:
                    raise GuestError("the guest does not read") from None

    def send_message(self, data_kind, end_kind, stream, data):
        """Sends a long message as credit allows."""
        end = time.monotonic() + self.deadline
        while data:
            part = data[:min(BODY_MAX, self._credit[stream])]
            if part:
                self._credit[stream] -= len(part)
                self.send(data_kind, stream, part)
                data = data[len(part):]
            elif not self.pump(0.2) and time.monotonic() > end:
                raise GuestError("the guest gives no credit")
        self.send(end_kind, stream)

    def pump(self, timeout):
        """Takes in what comes within the time; True when something came."""
        if not select.select([self.sock], [], [], timeout)[0]:
            return False
        try:
            data = self.sock.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        if not data:
            raise GuestError("the machine ended: " + self.console())
        self._in += data
        while len(self._in) >= 9:
            length, kind, stream = struct.unpack_from("<IBI", self._in)
            if not 5 <= length <= 65536:
                raise GuestError(f"a frame of length {length}")
            if len(self._in) < length + 4:
                break
            body, self._in = self._in[9:length + 4], self._in[length + 4:]
            self._take(kind, stream, body)
        return True

    def _take(self, kind, stream, body):
        if kind == EVENT:
            self.events.append(decode_event(body, time.monotonic()))
            self.withheld += len(body)
            self.give_credit()
        elif kind == CREDIT:
            self._credit[stream] += struct.unpack("<I", body)[0]
        elif kind == CALL_DATA:
            self._calls[stream] = self._calls.get(stream, b"") + body
            self.send(CREDIT, stream, struct.pack("<I", len(body)))
        elif kind == CALL_END:
            self._call_ready.append((stream, decode_call(self._calls.pop(stream))))
        elif kind == RESULT_DATA:
            self._result += body
            self.send(CREDIT, stream, struct.pack("<I", len(body)))
        elif kind == RESULT_END:
            self.result = self._result.decode()
        elif kind == FATAL:
            self.fatal = body.decode()
        else:
            self._frames.append((kind, stream, body))

    def give_credit(self):
        if self.give_event_credit and self.withheld:
            n, self.withheld = self.withheld, 0
            self.send(CREDIT, 0, struct.pack("<I", n))

    def wait(self, condition, what, seconds=None):
        """Serves the channel until the condition holds; returns its value."""
        end = time.monotonic() + (seconds or self.deadline)
        while not (value := condition()):
            if self.fatal is not None and what != "fatal":
                raise GuestError(f"fatal while waiting for {what}: {self.fatal}")
            if time.monotonic() > end:
                raise GuestError(f"no {what} in time; console: {self.console()}")
            self.pump(0.2)
        return value

    def console(self):
        if self.process.poll() is None:
            return "(still running)"
        return self.process.stdout.read().decode(errors="replace")[-2000:]

    def wait_exit(self, seconds=10):
        return self.process.wait(seconds)

    # --- the order of a run

    def probe(self, nonce=b"0123456789abcdef"):
        self.send(PROBE, 0, nonce)
        kind, _, body = self.wait(lambda: self._frames and self._frames.popleft(), "hello")
        r = Reader(body)
        if kind != HELLO or r.take(16) != nonce:
            raise GuestError(f"frame {kind} is no hello to our probe")
        hello = {"protocol": r.num("I"), "kernel": r.text(), "agent": r.text(), "memory_mib": r.num("I")}
        r.end()
        return hello

    def setup(self, prompt, shell=True, files=(), max_calls=100, tool_ms=120_000, real_ns=None, entropy=None):
        """files: (path, bytes) pairs. Returns what the guest acknowledged."""
        body = struct.pack("<q", real_ns or time.time_ns()) + (entropy or os.urandom(64))
        body += struct.pack("<BII", shell, max_calls, tool_ms) + put_str(prompt) + struct.pack("<I", len(files))
        for path, data in files:
            body += put_str(path) + struct.pack("<Q", len(data))
        for at in range(0, len(body), BODY_MAX):
            self.send(SETUP, 0, body[at:at + BODY_MAX])
        self.send(SETUP_END, 0, b"\0")
        for i, (_, data) in enumerate(files):
            self._send_file(i, data)
        self.send(SETUP_END, 0, b"\1")
        kind, _, body = self.wait(lambda: self._frames and self._frames.popleft(), "setup ack")
        if kind != SETUP_ACK:
            raise GuestError(f"frame {kind} is no setup ack")
        r = Reader(body)
        ack = {"reseeded": bool(r.num("B")), "clock_set": bool(r.num("B")), "workdir": r.text(), "boot_id": r.text()}
        r.end()
        return ack

    def _send_file(self, index, data):
        end = time.monotonic() + self.deadline
        while data:
            room = min(32768, self._credit[0] - 4)
            if room <= 0:
                if not self.pump(0.2) and time.monotonic() > end:
                    raise GuestError("the guest gives no credit for files")
                continue
            part, data = data[:room], data[room:]
            self._credit[0] -= len(part) + 4
            self.send(SETUP_FILE, 0, struct.pack("<I", index) + part)

    def call(self, seconds=None):
        """Waits for the next model call: (number, tools, messages)."""
        self.stream, (self.number, tools, messages) = self.wait(lambda: self._call_ready and self._call_ready.popleft(),
                                                               "model call", seconds)
        if self.stream != 2 * self.number - 1:
            raise GuestError(f"call {self.number} on stream {self.stream}")
        return self.number, tools, messages

    def reply(self, content="", calls=(), **more):
        """Answers the call that call() returned."""
        self.send_message(REPLY_DATA, REPLY_END, self.stream, encode_reply(self.number, content, calls, **more))

    def run_tools(self, *calls, seconds=None, **more):
        """Lets the model make these (name, arguments) calls and returns the agent's results, in order. arguments is JSON text."""
        self.reply("", [(f"call-{self.number}-{i}", name, arguments) for i, (name, arguments) in enumerate(calls)], **more)
        _, _, messages = self.call(seconds)
        return [m.content for m in messages[-len(calls):]]

    def start(self, prompt="a test", **more):
        """Probe, setup, and the first model call."""
        hello, ack = self.probe(), self.setup(prompt, **more)
        return hello, ack, self.call()

    def finish(self, text="done"):
        self.reply(text)
        return self.wait(lambda: self.result is not None and [self.result], "result")[0]

    def output_of(self, call_id):
        """All bytes that a command put on the timeline."""
        return b"".join(e.text for e in self.events if e.kind == SHELL_OUTPUT and e.call_id == call_id)


def shell(command, **more):
    """A call of the shell tool as Guest.run_tools takes it."""
    return "shell", json.dumps({"command": command, **more})


def tool(name, **arguments):
    return name, json.dumps(arguments)


def run(guest, command, **more):
    """(result for the model, what shell.exited said)"""
    result = guest.run_tools(shell(command, **more))[0]
    return result, [e for e in guest.events if e.kind == SHELL_EXITED][-1]


def main():
    parser = argparse.ArgumentParser(description="Boot a guest and run commands in it as its model would.")
    parser.add_argument("--image", required=True, help="directory that deploy/guest-image/pack wrote")
    parser.add_argument("--memory", type=int, default=512)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    with Guest(args.image, args.memory) as guest:
        hello = guest.probe()
        print(f"hello after {time.monotonic() - guest.started:.2f} s: {hello}")
        print("ack:", guest.setup("by hand"))
        guest.call()
        for command in args.command:
            begun = time.monotonic()
            result = guest.run_tools(("shell", json.dumps({"command": command})))[0]
            print(f"$ {command}\n{result}   ({time.monotonic() - begun:.2f} s)")
        print("result:", guest.finish())
    return 0


if __name__ == "__main__":
    sys.exit(main())
