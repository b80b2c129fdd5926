"""Hosts that get their guest image from the control plane: fetched, checked, switched, kept twice, damaged, without room. Small images that
nothing boots from, but for the last test."""
import os
import pathlib
import shutil
import subprocess

import pytest

import images
import wait
from client import say, shell, turns

PATIENCE = 90


class Host:
    """A node without image_dir, its control plane, and what an operator does with images there."""

    def __init__(self, stack, bin_dir):
        self.stack, self.control, self.node, self.bin_dir = stack, stack.control, stack.node, bin_dir
        self.dir = pathlib.Path(self.node.state_dir) / "images"

    def cli(self, *words):
        env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "EPHEMERAL_OPERATOR_URL": self.control.operator_url,
               "EPHEMERAL_OPERATOR_KEY": self.control.operator_key}
        done = subprocess.run([f"{self.bin_dir}/ephemeral", "admin", "image", *map(str, words)], capture_output=True, text=True, timeout=300, check=False, env=env)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def shown(self):
        return next(n for n in self.control.operator("GET", "/nodes?limit=100")["data"] if n["name"] == self.node.name)

    def until(self, image, state="ready", seconds=PATIENCE):
        def there():
            node = self.shown()
            return (node["image"], node["image_state"]) == (image, state) and node
        try:
            return wait.until(there, seconds, f"the host to be {state} with {image}")
        except AssertionError as error:
            raise AssertionError(f"{self.shown()}\n{self.node.log_tail()}") from error

    def whole(self, image):
        """The files of an image as they lie on the host are those of its name, root's, and nobody's to write."""
        folder = self.dir / image
        assert images.described(folder)["image"] == image
        for file in images.FILES.values():
            found = (folder / file).stat()
            assert (found.st_uid, found.st_mode & 0o777) == (0, 0o444)

    def kept(self):
        return {path.name for path in self.dir.iterdir() if len(path.name) == 64}


@pytest.fixture
def host(make_stack, bin_dir):
    return Host(make_stack(node={"image_dir": None}), bin_dir)


def test_a_host_follows_what_the_operator_says(host, tmp_path):
    """From nothing to an image, to another one by label, back without a byte over the link; two are kept; it says goodbye."""
    one, two, three = (images.make(tmp_path / name, name, kernel_seed="the same") for name in ("one", "two", "three"))
    node = host.until(None, "none")
    assert node["free"]["slots"] == 0, "it offers places and has nothing to start VMs from"
    client = host.stack.client()
    waiting = client.create(prompt=turns(say("Never said.")))["id"]
    for name in ("one", "two", "three"):
        host.cli("add", tmp_path / name)
    host.cli("use", one)
    assert host.until(one)["free"]["slots"] > 0
    host.whole(one)
    wait.until(lambda: client.read(waiting)["status"] != "queued" or any(e["type"] == "run.claimed" for e in client.events(waiting)), PATIENCE, "the run to be taken")
    client.cancel(waiting)                                          # no guest boots from this image
    host.control.query("UPDATE nodes SET labels = 'pool=canary' WHERE name = %s RETURNING 1", host.node.name)
    host.cli("use", two, "--label", "pool=canary")
    host.until(two)
    host.whole(two)
    assert (host.dir / one / "vmlinux").stat().st_ino == (host.dir / two / "vmlinux").stat().st_ino, "the same kernel was fetched again"
    host.control.query("DELETE FROM chunks WHERE sha256 <> ALL (SELECT hashes[3] FROM images WHERE hash = %s) RETURNING 1", three)
    host.cli("use", one, "--label", "pool=canary")                  # no piece of it is left in the control plane
    host.until(one)
    host.whole(one)
    assert host.kept() == {one, two}
    host.control.query("UPDATE nodes_live SET lease_until_ms = lease_until_ms + 3600000 RETURNING 1")
    assert host.node.stop() == 0
    assert (host.shown()["condition"], host.shown()["live"]) == ("stopped", False), "a host that stopped is shown as if it lived"
    host.node.start()
    assert (host.shown()["condition"], host.until(one)["live"]) == ("active", True)


def test_an_image_that_is_damaged_is_fetched_again(host, tmp_path):
    """Altered while it is in use, truncated and missing while the host was down; a description that lies. Nothing starts from any of them."""
    image = images.make(tmp_path / "i", "damage")
    host.cli("add", tmp_path / "i")
    host.cli("use", image)
    host.until(image)

    def damage(name, how):
        path = host.dir / image / name
        path.chmod(0o644)
        how(path)
    damage("rootfs.sqfs", lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]))
    wait.until(lambda: host.node.logged("the guest image is damaged"), PATIENCE, "the host to notice")
    wait.until(lambda: len(host.node.logged("is what new VMs start from")) == 2, PATIENCE, "the image to be fetched again")
    host.until(image)
    host.whole(image)
    for count, (name, how) in enumerate((("vmlinux", lambda path: os.truncate(path, 1000)), ("initramfs.cpio", os.unlink), ("rootfs.sqfs", lambda path: path.write_bytes(bytes(path.stat().st_size))),
                      ("image.json", lambda path: path.write_text("{}")), ("../current", lambda path: path.write_text("0" * 64))), 2):
        host.node.stop()
        damage(name, how)
        switched = len(host.node.logged("is what new VMs start from"))
        host.node.start()
        assert len(host.node.logged("no guest image here: no run is taken")) == count, f"{name}: the host did not see the damage at its start"
        wait.until(lambda: len(host.node.logged("is what new VMs start from")) > switched, PATIENCE, "the image to be fetched again")
        host.until(image)
        host.whole(image)


def test_wrong_bytes_no_room_and_no_answer(host, tmp_path):
    """A control plane (or a link) that gives other bytes; a disk that is full; pieces that are missing for a while: said, paused, tried again."""
    image = images.make(tmp_path / "i", "trouble", rootfs=6_000_000)
    host.node.stop()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=69m,mode=755", "tmpfs", str(host.dir)], check=True)
    try:
        host.node.start()
        host.cli("add", tmp_path / "i")
        sha = bytes.fromhex(images.described(tmp_path / "i")["kernel"])
        host.control.query("UPDATE chunks SET data = set_byte(data, 0, get_byte(data, 0) # 1) WHERE sha256 = %s AND position = 0 RETURNING 1", sha)
        host.cli("use", image)
        node = host.until(None, "failed")
        assert "not what its SHA-256 says" in node["image_note"] and node["free"]["slots"] == 0
        host.control.query("UPDATE chunks SET data = set_byte(data, 0, get_byte(data, 0) # 1) WHERE sha256 = %s AND position = 0 RETURNING 1", sha)
        wait.until(lambda: "disk is full" in (host.shown()["image_note"] or ""), PATIENCE, "the host to say that the disk is full")
        rootfs = bytes.fromhex(images.described(tmp_path / "i")["rootfs"])
        host.control.query("UPDATE chunks SET sha256 = '\\x00' WHERE sha256 = %s AND position = 7 RETURNING 1", rootfs)
        subprocess.run(["mount", "-o", "remount,size=200m", str(host.dir)], check=True)
        wait.until(lambda: "has not got this file" in (host.shown()["image_note"] or ""), PATIENCE, "the host to miss a piece")
        host.control.query("UPDATE chunks SET sha256 = %s WHERE sha256 = '\\x00' RETURNING 1", rootfs)
        host.until(image)
        host.whole(image)
    finally:
        host.node.stop()
        subprocess.run(["umount", str(host.dir)], check=True)


@pytest.mark.guest
def test_new_runs_start_from_the_new_image_and_old_ones_keep_theirs(host, image, tmp_path):
    """Two images that boot; a run of the first goes on over the switch; each run's receipt names the image that it ran from."""
    shutil.copytree(image, tmp_path / "first", ignore=shutil.ignore_patterns("*.new"))
    shutil.copytree(tmp_path / "first", tmp_path / "second", copy_function=os.link)
    other = tmp_path / "second" / "initramfs.cpio"
    data = other.read_bytes()
    other.unlink()
    other.write_bytes(data + bytes(512))                            # an archive may end in more zeros
    (tmp_path / "second" / "image.json").unlink()
    images.describe(tmp_path / "second")
    first, second = host.cli("add", tmp_path / "first"), host.cli("add", tmp_path / "second")
    host.cli("use", first)
    host.until(first, seconds=300)
    client = host.stack.client()
    old = client.create(prompt=turns(shell("sleep 200")), timeout_seconds=250)["id"]
    client.event(old, "shell.started", 120)
    host.cli("use", second)
    host.until(second, seconds=300)
    new = client.run(turns(say("From the second.")), 300)
    assert new["status"] == "succeeded", new["error"]
    assert client.read(old)["status"] == "running", "the run ended at the switch"
    client.cancel(old)
    assert client.settled(old)["status"] == "cancelled"
    assert [client.get(f"/v1/runs/{run}/receipt")["image_sha256"] for run in (old, new["id"])] == [first, second]
