"""Guest images on paper: three small files and their description, as deploy/guest-image/pack writes them; nothing boots from them."""
import hashlib
import json

FILES = {"kernel": "vmlinux", "initramfs": "initramfs.cpio", "rootfs": "rootfs.sqfs"}


def make(folder, seed, kernel=700_000, initramfs=1000, rootfs=2_500_000, kernel_seed=None):
    """Writes an image whose bytes follow from `seed`; returns its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    for (name, file), size in zip(FILES.items(), (kernel, initramfs, rootfs)):
        mine = kernel_seed if kernel_seed and name == "kernel" else seed
        (folder / file).write_bytes(hashlib.shake_256(f"{mine} {name}".encode()).digest(size))
    return describe(folder)


def described(folder):
    """The description that belongs to the files as they are."""
    made = {name: hashlib.sha256((folder / file).read_bytes()).hexdigest() for name, file in FILES.items()}
    return {**made, "image": hashlib.sha256("".join(f"{name} {made[name]}\n" for name in FILES).encode()).hexdigest(), "kernel_version": "6.1.0-test"}


def describe(folder):
    made = described(folder)
    (folder / "image.json").write_text(json.dumps(made, indent=1) + "\n", encoding="ascii")
    return made["image"]
