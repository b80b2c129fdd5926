"""Commands that attack their machine, through the whole service: the run ends in time with the right status and record, nothing is left on
the host, and the next run is as fresh as the one before. What one guest alone withstands is in test_guest_attacks.py."""
import base64

import control as control_rig
import fixtures
import node as node_rig
import pytest
from attacks import BYTES, DAEMONS, REACH, SECRETS, both_streams
from client import check_chain, check_timeline, output_of, say, shell, turns

FRESH = ("cd; echo $HOME $USER $(id -u) $(( $$ < 200 )); ls -A . /tmp/e*/scratch /var/tmp /dev/shm /run | grep -c .; find /tmp -newer /proc/1/cmdline -type f | wc -l; "
         "cat /proc/sysvipc/* | grep -c '^ *[0-9]'; cat /sys/fs/cgroup/worker/memory.max /sys/fs/cgroup/worker/pids.max; nproc; df --output=used,iused /tmp | tail -1; "
         "ls -l /dev | cut -c1-10,60-; cat /etc/machine-id /etc/hostname; uname -a; mount | sort | md5sum; cat /proc/sys/kernel/random/boot_id >&2")


@pytest.fixture(scope="module")
def node(cluster, bin_dir, image):
    control = control_rig.Control(cluster, bin_dir)
    made = fixtures.Stack(control, node_rig.Node(control, bin_dir, image, max_vms=4, boot_timeout_ms=120000).start())
    yield made
    made.close()


def fresh(client):
    """What a new machine says of itself; the second value differs in each."""
    run = client.run(turns(shell(FRESH), say("{{tool:1}}")), max_cost_micros=2_000_000)
    events = client.events(run["id"])
    check_timeline(run, events)
    assert run["status"] == "succeeded", run["error"]
    one, two = ("".join(e["data"]["text"] for e in events if e["type"] == "shell.output" and e["data"]["stream"] == name) for name in ("stdout", "stderr"))
    return one, two


def alike(one, two):
    """Whether two machines say the same; the memory that was free when the guest set its limit depends a little on how the boot went by."""
    lines, others = one.split("\n"), two.split("\n")
    memory, other_memory = int(lines.pop(4)), int(others.pop(4))
    return lines == others and abs(memory - other_memory) <= 4 << 20


def written(events, stream, call_id):
    """The bytes of a stream as the events of a command have them."""
    parts = [e["data"] for e in events if e["type"] == "shell.output" and e["data"]["stream"] == stream and e["data"]["call_id"] == call_id]
    return b"".join(base64.b64decode(part["base64"]) if "base64" in part else part["text"].encode() for part in parts)


def commands(*list_of_commands, seconds=8):
    return turns(*(shell(command, timeout_seconds=seconds) for command in list_of_commands), shell("echo still here"), say("end: {{tool:%d}}" % (len(list_of_commands) + 1)))


VSOCK = ("import socket\nfor cid in (0, 1, 2, 3):\n try:\n  s = socket.socket(40, socket.SOCK_STREAM); s.settimeout(1); s.connect((cid, 1024)); print('OPEN')\n"
         " except Exception as e: print(type(e).__name__)")
FILES = [{"path": f"a/{name}", "content": text} for name, text in
         (("reach.py", REACH), ("secrets.py", SECRETS), ("bytes.py", BYTES), ("daemons.pl", DAEMONS))]
RUNS = {
    "fork": ["f() { f | f & }; f; sleep 2; echo forked", "kill -9 -1", "perl a/daemons.pl", "echo after"],
    "full": ["head -c 4G /dev/zero > /tmp/big; echo wrote $?", "df /tmp | tail -1; rm -f /tmp/big; echo x > /tmp/y && cat /tmp/y",
             "i=0; while mkdir /tmp/d$i 2>/dev/null && [ $i -lt 3000 ]; do i=$((i+1)); done; echo made $i"],
    "memory": ["python3 -c 'x = []\nwhile True: x.append(bytearray(10000000))'; echo hog $?", "tail /dev/zero; echo tail $?"],
    "output": ["head -c 100000000 /dev/zero | tr '\\0' x", "yes no | head -c 3000000 >&2", "python3 a/bytes.py"],
    "stubborn": ["trap '' TERM INT HUP; echo ready; while :; do sleep 1; done", "(setsid sh -c 'while :; do echo daemon; sleep 1; done' &); echo left",
                 "pgrep -f daemon; echo looked"],
    "devices": ["for d in /dev/vport* /dev/hvc* /dev/vda /dev/mem /dev/kmem /dev/ttyS0 /dev/console; do (echo x > $d) 2>/dev/null && echo OPEN $d; done; ls /dev",
                f"python3 -c \"{VSOCK}\"", "unshare -Ur id; mount -t tmpfs x /mnt; echo b > /proc/sysrq-trigger; kill -9 1; echo tried", "exec 3<>/dev/tcp/10.0.2.2/53; echo net $?",
                "python3 a/reach.py", "python3 a/secrets.py"],
}
SECONDS = {"memory": 80, "output": 80}    # their commands come to an end of their own, on a busy machine as well


@pytest.mark.guest
def test_hostile_commands(node):
    client = node.client()
    before, boot_id = fresh(client)
    made = {name: client.create(prompt=commands(*lines, seconds=SECONDS.get(name, 8)), timeout_seconds=200, max_cost_micros=5_000_000, files=FILES)["id"] for name, lines in RUNS.items()}
    found = {}
    for name, run_id in made.items():
        run, events = client.settled(run_id, 260), client.events(run_id)
        check_timeline(run, events)
        check_chain(node.control.event_rows(run_id))
        assert run["status"] == "succeeded" and "still here" in run["output"], (name, run["status"], run["error"])
        started = [e["data"]["call_id"] for e in events if e["type"] == "shell.started"]
        assert started == [e["data"]["call_id"] for e in events if e["type"] == "shell.exited"], f"{name}: a command without an end"
        found[name] = events
    node.node.clean()
    text = {name: output_of(events) for name, events in found.items()}
    exits = {name: [e["data"] for e in events if e["type"] == "shell.exited"] for name, events in found.items()}
    assert "after" in text["fork"] and exits["fork"][2]["timed_out"]
    assert "wrote 1" in text["full"]
    assert "hog 137" in text["memory"] and "tail 137" in text["memory"], exits["memory"]
    shown = sum(len(written(found["output"], stream, exits["output"][0]["call_id"])) for stream in ("stdout", "stderr"))
    assert shown + exits["output"][0]["cut_bytes"] == 100_000_000 and exits["output"][0]["exit_code"] == 0
    assert tuple(written(found["output"], stream, exits["output"][2]["call_id"]) for stream in ("stdout", "stderr")) == both_streams()
    assert exits["stubborn"][0]["timed_out"] and "left" in text["stubborn"]
    assert "OPEN" not in text["devices"], text["devices"]
    assert "tried" in text["devices"] and "uid=0" not in text["devices"]
    assert "tried all" in text["devices"] and "DONE" not in text["devices"]
    assert "looked at True []\nleftovers []\nsetid [] capable []\n" in text["devices"]
    # The same node, the same slots: a new machine is as new as the first one, and another one.
    after, other_boot_id = fresh(client)
    assert alike(before, after) and other_boot_id != boot_id, (before, after)
    node.control.check_ledger()
