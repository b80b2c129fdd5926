"""What the tests of the command share: running it, transcripts with the changing parts masked, and services that are none.

Transcripts stand in tests/e2e/transcripts/. `EPHEMERAL_UPDATE=1 tests/run e2e -k transcript` writes them anew; read the difference before
you commit it."""
import difflib
import os
import pathlib
import pty
import re
import select
import socket
import subprocess
import threading

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "e2e" / "transcripts"
MASKS = [(re.compile(pattern), mask) for pattern, mask in (
    (r"\b(run|org|key|node|nt|mem|req|cli|vm)_[0-9a-f]{16,32}\b", r"\1_…"),
    (r"\b(eph|ephop)_[A-Za-z0-9_-]{43}\b", r"\1_…"),
    (r"\bephnt_[A-Za-z0-9_.-]+", "ephnt_…"),
    (r"\b[0-9a-f]{64}\b", "HASH"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?", "TIME"),
    (r"(_micros\"?: ?)\d+", r"\1N"),
    (r"\$\d[\d.,]* *", "$… "),
    (r"(127\.0\.0\.1|localhost):\d+", r"\1:PORT"),
    (r"^ +\d+\.\d\d  ", "   T.TT  "),
    (r"(\"(?:t|boot_ms|lifetime_ms|gone_ms|compute_ms)\": ?)[\d.]+", r"\1N"),
    (r"\b\d+\.\d+ s\b", "N s"),
    (r" after \d+ ms\b", " after N ms"),
    (r"\"next_cursor\":\"[^\"]+\"", '"next_cursor":"CURSOR"'),
    (r"--cursor \S+", "--cursor CURSOR"),
    (r"[ \t]+$", ""),
)]


def mask(text, *more):
    for old, new in more:
        text = text.replace(str(old), new)
    lines = text.split("\n")
    for pattern, replacement in MASKS:
        lines = [pattern.sub(replacement, line) for line in lines]
    return "\n".join(lines)


class Transcripts:
    """Collects blocks by file; `check()` compares with what is recorded, or records."""

    def __init__(self):
        self.files = {}

    def add(self, name, command, done, *more):
        out = done.stdout.decode(errors="backslashreplace")
        err = "".join(f"! {line}\n" for line in done.stderr.decode(errors="backslashreplace").splitlines())
        block = f"$ {command}\n{out}{'' if out.endswith(chr(10)) or not out else chr(10)}{err}exit {done.returncode}\n"
        self.files.setdefault(name, []).append(mask(block, *more))

    def check(self):
        wrong = []
        for name, blocks in self.files.items():
            text, path = "\n".join(blocks), FOLDER / f"{name.replace(' ', '-')}.txt"
            if os.environ.get("EPHEMERAL_UPDATE"):
                path.write_text(text, encoding="utf-8")
            elif not path.exists():
                wrong.append(f"{path.name} is not recorded (EPHEMERAL_UPDATE=1 records it):\n{text[:2000]}")
            elif path.read_text(encoding="utf-8") != text:
                wrong.append("\n".join(difflib.unified_diff(path.read_text(encoding="utf-8").splitlines(), text.splitlines(), f"recorded {path.name}",
                                                            "now", lineterm="")))
        assert not wrong, "\n\n".join(wrong)


class Command:
    """The command with an environment of its own; `home` is empty at first."""

    def __init__(self, bin_dir, home):
        self.program, self.home = f"{bin_dir}/ephemeral", home

    def env(self, **changes):
        made = {"PATH": os.environ["PATH"], "HOME": str(self.home), "COLUMNS": "100", "ASAN_OPTIONS": "detect_leaks=1", **changes}
        return {name: value for name, value in made.items() if value is not None}

    def run(self, *words, input=b"", env=None, timeout=120, **kwargs):
        kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
        done = subprocess.run([self.program, *words], input=input, env=self.env(**(env or {})), timeout=timeout, check=False, **kwargs)
        said = done.stderr or b""
        assert b"Sanitizer" not in said and b"runtime error" not in said, said.decode(errors="replace")
        return done

    def verbs(self):
        """{verb: its words}, from the program's own help."""
        names = re.findall(r"^  ((?:admin )?[a-z]+(?: [a-z]+)*?)  +\S", self.run("help").stdout.decode(), re.M)
        usage = {name: self.run("help", *name.split()).stdout.decode().split(": ")[0] for name in names}
        return {name: re.sub(rf"^ephemeral {name} ?|\[options\]", "", re.sub(r"\s+", " ", text)).strip() for name, text in usage.items()}

    def on_terminal(self, *words, env=None, timeout=60):
        """(exit status, every byte that reached the terminal)."""
        master, slave = pty.openpty()
        process = subprocess.Popen([self.program, *words], env=self.env(TERM="xterm", COLUMNS=None, **(env or {})), stdin=subprocess.DEVNULL,
                                   stdout=slave, stderr=slave, close_fds=True)
        os.close(slave)
        seen = b""
        try:
            while select.select([master], [], [], timeout)[0]:
                piece = os.read(master, 65536)
                if not piece:
                    break
                seen += piece
        except OSError:  # the other end is closed
            pass
        os.close(master)
        return process.wait(timeout), seen


class Service:
    """Something on a port that answers every request alike. answer(head) gives the bytes, or an iterator of pieces; then the connection is closed."""

    def __init__(self, answer, context=None):
        self.answer, self.asked, self.context = answer, [], context
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.over = False
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while not self.over:
            try:
                peer, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(peer,), daemon=True).start()

    def serve(self, peer):
        with peer:
            try:
                peer.settimeout(30)
                if self.context:
                    peer = self.context.wrap_socket(peer, server_side=True)
                data = b""
                while b"\r\n\r\n" not in data:
                    piece = peer.recv(65536)
                    if not piece:
                        return
                    data += piece
                    if data[:1] == b"\x16":  # a TLS hello: what a plain server says to it
                        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        return
                head, _, body = data.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                while length and len(body) < int(length.group(1)):
                    body += peer.recv(65536)
                self.asked.append(head)
                answer = self.answer(head)
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    peer.sendall(piece)
            except OSError:
                pass

    def close(self):
        self.over = True
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def reply(status, body, kind="application/json", length=None):
    """The bytes of a whole answer; length says another one than there is."""
    return (f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body) if length is None else length}\r\n"
            "Connection: close\r\n\r\n").encode() + body
