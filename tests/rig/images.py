"""Guest images on paper: three small files and their description, as deploy/guest-image/pack writes them; nothing boots from them."""
import hashlib
import json

FILES = {"kernel": "vmlinux", "initramfs": "initramfs.cpio", "rootfs": "rootfs.sqfs"}


def make(folder, seed, kernel=700_000, initramfs=1000, rootfs=2_500_000):
    """Writes an image whose bytes follow from `seed`; returns its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {}
    for (name, file), size in zip(FILES.items(), (kernel, initramfs, rootfs)):
        data = hashlib.shake_256(f"{seed} {name}".encode()).digest(size)
        (folder / file).write_bytes(data)
        described[name] = hashlib.sha256(data).hexdigest()
    described["image"] = name_of(described)
    described["kernel_version"] = "6.1.0-test"
    (folder / "image.json").write_text(json.dumps(described, indent=1) + "\n", encoding="ascii")
    return described["image"]


def name_of(described):
    return hashlib.sha256("".join(f"{name} {described[name]}\n" for name in FILES).encode()).hexdigest()
