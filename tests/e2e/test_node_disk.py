"""What a node writes down before it acts, and what others do with the files that it reads."""
import fcntl
import os
import shutil
import struct

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
