"""What a node writes down before it acts, and what others do with the files that it reads."""
import fcntl
import os
import re
import shutil
import struct
import subprocess

import host
import pytest
import wait
from client import say, shell, turns


@pytest.mark.guest
def test_who_waits_for_a_boot_is_in_the_journal(make_stack):
    """Both runs are in the journal while one boots and the other waits for its turn: a node that is killed now knows of both."""
    stack = make_stack(node={"max_vms": 2, "max_concurrent_boots": 1})
    node, client = stack.node, stack.client()
    made = [client.create(prompt=turns(shell("sleep 100"), say("never said")))["id"] for _ in range(2)]
    wait.until(lambda: len(host.children(f"{node.state_dir}/journal")) == 2, 60, "the second run in the journal", every=0.002)
    assert "from=probe to=start" not in node.log.read_text(errors="replace"), "the second run was written down when the first had booted"
    for run in made:
        client.cancel(run)
    for run in made:
        client.settled(run)
    node.clean()
    assert host.children(f"{node.state_dir}/journal") == []


@pytest.mark.guest
def test_a_lock_on_the_image_stops_nobody(make_stack, image, tmp_path):
    """Whoever can read the image can lock it, as QEMU does where it takes an image for its own: VMs start all the same."""
    for name in ("vmlinux", "initramfs.cpio"):
        (tmp_path / name).symlink_to(f"{image}/{name}")
    for name in ("image.json", "rootfs.sqfs"):
        shutil.copy(f"{image}/{name}", tmp_path)
    stack = make_stack(node={"image_dir": tmp_path})
    with open(tmp_path / "rootfs.sqfs", "rb") as file:
        whole = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole)
        run = stack.client().run(turns(shell("echo here"), say("done")))
    assert run["status"] == "succeeded", run["error"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for one run's record."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=44m,mode=0700", "eph-small-disk", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.guest
def test_full_disk(make_stack, small_disk):
    """A run whose record has no room is refused without an attempt, waits, and starts when there is room; nothing else breaks."""
    stack = make_stack(node={"max_vms": 3, "state_dir": str(small_disk / "state"), "spool_keep_seconds": 0})
    stack.node.state_dir = str(small_disk / "state")
    node, client = stack.node, stack.client()

    def logged(text):
        return re.findall(text, node.log.read_text(errors="replace"))

    first = client.create(prompt=turns(shell("sleep 300"), say("never said")))["id"]
    client.event(first, "worker.started", 120)
    second = client.create(prompt=turns(say("done")))["id"]
    wait.until(lambda: logged(f"run={second} refused failed=0 code=no_capacity .*MiB are free on the disk"), 60, "the refusal")
    client.cancel(first)
    client.settled(first)
    run = client.settled(second, 180)
    assert run["status"] == "succeeded", run["error"]

    # Not a byte is left: there is no place for a journal entry either.
    with open(small_disk / "filler", "wb") as filler:
        with pytest.raises(OSError):
            while True:
                filler.write(bytes(65536))
                filler.flush()
    third = client.create(prompt=turns(say("done")))["id"]
    wait.until(lambda: logged(f"run={third} refused failed=0"), 60, "the refusal on a full disk")
    (small_disk / "filler").unlink()
    run = client.settled(third, 180)
    assert run["status"] == "succeeded", run["error"]
    node.clean()


def in_journal(node):
    """Its entries, but those that are being written."""
    return len([entry for entry in host.children(f"{node.state_dir}/journal") if not str(entry).rsplit("/", 1)[-1].startswith(".")])


@pytest.mark.guest
def test_more_than_there_is_room_for(make_stack):
    """50 starts at once on a host with room for 10: ten are there, never one more; the others wait and can be taken back."""
    stack = make_stack(node={"max_vms": 10, "memory_mib": 60000, "vcpus": 64, "max_concurrent_boots": 2})
    node, client = stack.node, stack.client()
    made = [client.create(prompt=turns(shell("sleep 300"), say("never said")), size="small")["id"] for _ in range(50)]
    entries = []

    def ten():
        entries.append(in_journal(node))
        return entries[-1] == 10
    wait.until(ten, 120, "ten runs that have a place", every=0.005)
    wait.until(lambda: client.read(made[0])["status"] == "running" or any(client.read(run)["status"] == "running" for run in made[:12]), 180, "one that runs")
    assert not ten() or max(entries) == 10
    assert max(entries) == 10 and len(host.children(f"{node.run_dir}/vm")) <= 10
    for run in reversed(made):
        client.cancel(run)
        entries.append(in_journal(node))
    for run in made:
        assert client.settled(run, 180)["status"] == "cancelled"
    assert max(entries) == 10
    node.clean()
