"""Commands that attack the machine they run in, against guest-agent alone in one booted guest: whatever a command does, the agent answers,
the command ends in its time, and the next command finds a machine as good as before. test_hostile_commands.py does it through the service."""
import re
import time

import pytest
from attacks import FILES, both_streams
from fixtures import count
from guest_host import SHELL_EXITED, SHELL_OUTPUT, Guest, run, shell, tool

# One guest, in this order: what an attack left is taken away by a later test, in the same machine.
pytestmark = pytest.mark.xdist_group("guest_attacks")


@pytest.fixture(scope="module")
def worker(image):
    """One guest for all attacks; it must survive every one of them."""
    count("guests", 1)
    with Guest(image, deadline=280.0) as guest:
        guest.start(files=FILES)
        yield guest


def streams(guest):
    """What the last command put on the timeline: (stdout, stderr, cut bytes)."""
    exited = [e for e in guest.events if e.kind == SHELL_EXITED][-1]
    parts = [e for e in guest.events if e.kind == SHELL_OUTPUT and e.call_id == exited.call_id]
    return *(b"".join(e.text for e in parts if e.stream == n) for n in (1, 2)), exited.cut_bytes


AS_BEFORE = """
import glob, os
for top in ("/tmp", "/dev/shm", "/home/worker", "/var/tmp"):
    for entry in os.scandir(top):
        if entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)
stats = [open(p).read().rsplit(")", 1)[1].split()[0] for p in glob.glob("/proc/[0-9]*/stat")]
kids = []
for n in range(100):
    kids.append(os.fork())
    if kids[-1] == 0:
        os._exit(0)
for kid in kids:
    os.waitpid(kid, 0)
used = int(open("/sys/fs/cgroup/worker/memory.current").read()) >> 20
free = int(open("/proc/meminfo").read().split()[7]) >> 10
open("/tmp/big", "wb").write(bytes(40 << 20))
os.unlink("/tmp/big")
print("here", len(stats), stats.count("Z"), used, free, len(bytearray(150 << 20)))
"""


def as_before(guest):
    """Nothing of an attack is left: processes, zombies, memory, room for processes and files."""
    result, exited = run(guest, f"python3 - <<'X'{AS_BEFORE}X", timeout_seconds=100)
    assert exited.code == 0 and not exited.has_signal, result
    here, zombies, used, free = map(int, re.search(r"here (\d+) (\d+) (\d+) (\d+) 157286400", result).groups())
    assert here < 70 and zombies == 0, result
    assert used < 150 and free > 250, f"{used} MiB of the limit are still used, {free} MiB free"


@pytest.mark.parametrize("command", [
    ":(){ :|:& };: ; wait",
    "python3 -c 'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'",
    "dd if=/dev/zero of=/tmp/big bs=1M; dd if=/dev/zero of=/dev/shm/big bs=1M; dd if=/dev/zero of=/home/worker/big bs=1M",
    "python3 -c 'a=[]\nwhile True: a.append(bytearray(1<<20))'",
    "for i in 1 2 3 4; do python3 -c 'a=[]\nwhile True: a.append(bytearray(1<<20))' & done; wait",
    "head -c 100000000 /dev/zero | tr '\\0' x",
    "kill -9 -1; kill -9 1; kill -STOP 1; kill -SEGV 1",
    "kill -STOP $$",
    "exec 1>&- 2>&-; sleep 300",
    "python3 -c 'import os\nfor i in range(300000): os.close(os.open(\"/tmp/f%d\" % i, os.O_CREAT))'",
    "for i in 1 2 3; do python3 -c 'import socket\ns=[]\nwhile True:\n  p=socket.socketpair()\n  s.append(p)\n  for x in p:\n    x.setblocking(False)\n"
    "    try:\n      while True: x.send(bytes(65536))\n    except BlockingIOError: pass' & done; wait",
    "python3 -c 'import threading, time\nfor i in range(500): threading.Thread(target=time.sleep, args=(100,)).start()'",
    "perl a/daemons.pl",
    "for i in $(seq 100); do python3 -c 'x = bytearray(10000000)\nimport signal; signal.pause()' & done; wait",
    "cat $(find /usr/bin /usr/lib/git-core -type f | head -400) > /dev/null; echo read",
    "kill -STOP -1; kill -STOP $$",
    "for i in 1 2 3 4; do nice -n 19 bash -c 'while :; do :; done' & (while :; do (true &) ; done) & done; wait",
    "ulimit -n 4096; exec 3>&1; python3 -c 'import os\nfor n in range(5, 4000): os.dup2(1, n)\nfor n in range(120): os.fork() or os.pause()\nos.kill(os.getpid(), 9)'",
    "python3 -c 'import ctypes, os\nl = ctypes.CDLL(None); f = l.inotify_init()\nfor n in range(5000): l.inotify_add_watch(f, b\"/tmp\", 0xfff)\n"
    "while True: open(\"/tmp/fx\", \"w\").close(); os.unlink(\"/tmp/fx\")'",
    "cp /usr/bin/sleep gone; ./gone 100 & rm gone; exec 9</usr/bin/sleep; exec -a x ./gone 5; exec /proc/self/fd/9 300",
])
def test_agent_survives(worker, command):
    begun = time.monotonic()
    result, exited = run(worker, command, timeout_seconds=2)
    assert exited.duration_ms < 2000 + 8000, result[-300:]
    assert time.monotonic() - begun < 90
    result, exited = run(worker, "echo fine", timeout_seconds=30)
    assert result == "fine\n[exit code 0]" and exited.code == 0


def test_nothing_of_them_is_left(worker):
    """After all of the above, in the same machine."""
    as_before(worker)


def test_orphans(worker):
    """3,000 processes that nobody waited for, 100 at once: reaped as they end, or the limit of 128 would stop the next ones."""
    for _ in range(3):
        result, exited = run(worker, "perl a/orphans.pl 10; cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z'; cat /sys/fs/cgroup/worker/pids.current",
                             timeout_seconds=120)
        assert result.startswith("orphans made\n0\n"), result
        assert int(result.splitlines()[2]) <= 4 and exited.code == 0


def test_memory_that_outlives_processes(worker):
    """Shared memory, queues, semaphores that were not removed, and descriptors left in flight, go with the command that made them."""
    result, exited = run(worker, "python3 a/ipc.py", timeout_seconds=60)
    assert "left behind True" in result
    result, exited = run(worker, "cat /proc/sysvipc/* | grep -c '^ *[0-9]'; python3 -c 'print(len(bytearray(250 << 20)))'", timeout_seconds=60)
    assert result.startswith("0\n262144000\n"), result
    result, exited = run(worker, "python3 a/in_flight.py; python3 -c 'import array, os, socket\nfd = os.memfd_create(\"x\"); os.write(fd, bytes(150 << 20))\n"
                                 "a, b = socket.socketpair()\nfor s in (a, b): s.sendmsg([b\"x\"], [(1, 1, array.array(\"i\", [fd, 1, a.fileno(), b.fileno()]))])'")
    assert exited.code == 0 and not exited.timed_out, result
    as_before(worker)


def test_memory_that_is_not_counted(worker):
    """What the kernel keeps for a process without counting it: the command ends before the machine is out of memory."""
    result, exited = run(worker, "python3 a/uncounted.py", timeout_seconds=100)
    assert "filled" in result and exited.has_signal and exited.code == 9 and not exited.timed_out, result
    assert "a process was killed because" in result
    run(worker, "python3 -c 'import os; [os.unlink(\"/var/tmp/\" + n) for n in os.listdir(\"/var/tmp\")]'", timeout_seconds=60)
    result, _ = run(worker, "python3 -c 'import os; k = []\nwhile True: k.append(os.openpty())' 2>&1 | tail -1; touch q; python3 -c 'import os; "
                            "os.setxattr(\"q\", \"system.posix_acl_access\", bytes(4))'", timeout_seconds=30)
    assert "No space left on device" in result and "Operation not supported" in result, result
    as_before(worker)


def test_output_is_exact(worker):
    """Any bytes, one at a time, on both streams: the events of a stream join to what was written."""
    run(worker, "python3 a/bytes.py", timeout_seconds=60)
    assert streams(worker) == (*both_streams(), 0)


@pytest.mark.parametrize("streams_used", [(1,), (1, 2)])
def test_100_megabytes(worker, streams_used):
    """All of it is taken, and what is not shown is counted to the byte, over both streams."""
    result, exited = run(worker, f"""python3 -c 'import os
data = "é".encode() * 50000
for n in range(1000):
    for part in range(0, 100000, 50000):
        os.write({streams_used}[n % {len(streams_used)}], data[part:part + 50000])'""", timeout_seconds=100)
    one, two, cut = streams(worker)
    assert len(one) + len(two) + cut == 100_000_000 and exited.code == 0
    assert len(one) + len(two) <= 1 << 20 and one.decode() + two.decode() and (two != b"") == (len(streams_used) == 2)
    assert len(result) <= 2 * 132_000 and "bytes cut ...]" in result


def test_nothing_is_within_reach(worker):
    result, exited = run(worker, "python3 a/reach.py; echo b > /proc/sysrq-trigger; su -c id </dev/null; PATH=$PATH:/usr/sbin:/sbin; chroot / id; "
                                 "cp /usr/bin/id me; chmod 6755 me; ./me -u; rm me", timeout_seconds=60)
    assert "tried all" in result, result
    assert "DONE" not in result, [line for line in result.splitlines() if line.startswith("DONE")]
    assert result.count("refused ") > 130 and "uid=0" not in result and "\n1000\n" in result, result[-500:]


def test_no_secret_is_found(worker):
    result, _ = run(worker, "python3 a/secrets.py", timeout_seconds=60)
    assert result.startswith("looked at True []\nleftovers []\nsetid [] capable []\n"), result


def test_working_directory_without_permissions(worker):
    """The worker may spoil its folder, and mend it by the next command."""
    result, _ = run(worker, "chmod 000 .; ls; mv \"$PWD\" /tmp/z; rmdir \"$PWD\"; ln -sfn / \"$PWD\"; echo left")
    assert result.count("ermission denied") >= 3 and "left" in result, result
    results = worker.run_tools(tool("list_files"), tool("write_file", path="x", content="x"), shell("pwd; ls; chmod 755 \"$PWD\"; ls -d a"))
    assert "permission denied" in results[0] and "permission denied" in results[1]
    assert re.match(r"/tmp/ephemeral-run-\w{6}/scratch\nls: .*\na\n", results[2]), results[2]


def test_tricky_files(worker):
    run(worker, r"""python3 - <<'X'
import os
os.mkfifo("pipe"); os.symlink("pipe", "to_pipe"); os.symlink("/proc/1/environ", "env"); os.symlink("loop", "loop"); os.symlink("/etc/passwd", "etc")
os.truncate(os.open("sparse", os.O_CREAT | os.O_RDWR), 1 << 40)
for name in (b"new\nline", b"esc\x1b[2J", b"\xff" * 255, b"-rf", b" "):
    open(name, "w").close()
os.mkdir("wide"); os.chdir("wide")
for n in range(1100):
    os.symlink(b"\xfe" * 1000, b"%04d" % n + b"\xff" * 251)
os.chdir("..")
for n in range(400):
    os.mkdir("d" * 200); os.chdir("d" * 200)
open("bottom", "w").write("deep")
X""", timeout_seconds=60)
    asked = [("read_file", "pipe", "not a regular file"), ("read_file", "to_pipe", "not a regular file"), ("write_file", "pipe", "Not done"), ("read_file", "env", "ermission denied"),
             ("read_file", "loop", "symbolic links"), ("read_file", "etc", "root:x:0:0"), ("write_file", "etc", "ermission denied"), ("read_file", "sparse", "not a text file"),
             ("read_file", "/proc/self/mem", "ermission denied"), ("read_file", "/proc/self/environ", "ermission denied"), ("read_file", "/proc/1/mem", "ermission denied"),
             ("read_file", "/dev/stdin", "Not done"), ("write_file", "/dev/stdout", "Not done"), ("read_file", "/dev/zero", "not a regular file"),
             ("read_file", "/dev/tty", "Not done"), ("read_file", "/proc/kmsg", "ermission denied"), ("write_file", "../x", "ermission denied"),
             ("write_file", "/proc/self/oom_score_adj", "ermission denied"), ("read_file", "d" * 300, "too long"), ("read_file", "/".join(["d" * 200] * 19), "Not done: d")]
    results = worker.run_tools(*[tool(name, path=path, **({"content": "x"} if name == "write_file" else {})) for name, path, _ in asked])
    for (name, path, text), result in zip(asked, results, strict=True):
        assert text in result, (name, path[:40], result[:300])
    listed, wide = worker.run_tools(tool("list_files"), tool("list_files", path="wide"))
    assert "line" in listed and "new\nline" not in listed and "\x1b" not in listed and "file 1099511627776 sparse\n" in listed and "special - pipe\n" in listed
    assert "bytes cut ...]" in wide and wide.rstrip().endswith("[100 more entries are not shown]"), wide[-300:]
    run(worker, "rm -rf wide d* sparse; true", timeout_seconds=60)


def test_long_arguments(worker):
    """More than a program can be given is an error of that program; the longest command there is runs."""
    result, _ = run(worker, "python3 -c 'import os\ntry: os.execv(\"/bin/true\", [\"x\" * 100000] * 100)\nexcept OSError as e: print(e.strerror)\n"
                            "try: os.execve(\"/bin/true\", [\"x\"], {str(n): \"y\" * 1000 for n in range(9000)})\nexcept OSError as e: print(e.strerror)'")
    assert result.count("Argument list too long") == 2, result
    longest = "echo " + "x" * (128 * 1024 - 1 - 13) + "; echo y"
    results = worker.run_tools(shell(longest), shell(longest + "z"))
    assert results[0].endswith("y\n[exit code 0]") and "Not done" in results[1] and "131071 are allowed" in results[1]


def test_nothing_to_escalate_with(worker):
    result, _ = run(worker, """
python3 - <<'X'
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
for family in (40, 17, 38):
    try: print("open", socket.socket(family, socket.SOCK_STREAM))
    except OSError as e: print("refused", family, e.errno)
for name, number in (("io_uring_setup", 425), ("bpf", 321), ("userfaultfd", 323), ("keyctl", 250)):
    print(name, libc.syscall(number, 0, 0, 0), ctypes.get_errno())
print("x32", libc.syscall(0x40000000 + 41, 40, 1, 0), ctypes.get_errno())
print(open("/proc/self/status").read())
print(sorted(os.listdir("/dev")), os.access("/proc/1/mem", os.R_OK))
print([os.readlink("/proc/self/fd/" + f) for f in ("0", "1", "2")], len(os.listdir("/proc/self/fd")))
X
unshare -Ur id; mount -t tmpfs x /mnt; echo 1 > /sys/fs/cgroup/worker/pids.max; cat /dev/vport0p1; ls /dev/vd* ; dmesg
cat /proc/self/oom_score_adj; echo -1000 > /proc/self/oom_score_adj; ulimit -c; ls /sys/class/net; find / -xdev -perm /6000 2>/dev/null | wc -l
""")
    for text in ("refused 40 97", "refused 17 1", "refused 38 97", "io_uring_setup -1 38", "bpf -1 1", "userfaultfd -1 1",
                 "keyctl -1 1", "x32 -1 38", "CapBnd:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2",
                 "['fd', 'full', 'null', 'ptmx', 'pts', 'random', 'shm', 'stderr', 'stdin', 'stdout', 'tty', 'urandom', 'zero'] False",
                 "unshare failed: No space left on device", "pids.max: Permission denied", "/dev/vport0p1: No such file",
                 "\n0\n", "oom_score_adj: Permission denied", "\nlo\n"):
        assert text in result or (text.startswith("oom") and "write error: Permission denied" in result), (text, result)
