"""What a node may leave on a host: nothing. Lists what is there of processes, cgroups, namespaces, directories of one node."""
import os
import pathlib

CGROUPS = pathlib.Path("/sys/fs/cgroup")


def processes(uid_base, slots=64):
    """Live processes (not zombies) that run under the uids of a node's VMs."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "status").read_text()
            uid = int(status.split("Uid:")[1].split()[0])
            state = status.split("State:")[1].split()[0]
            if uid_base <= uid < uid_base + 3 * slots and state not in ("Z", "X"):
                found.append(f"pid {entry.name} uid {uid} {(entry / 'cmdline').read_bytes()[:80]!r}")
        except (FileNotFoundError, ProcessLookupError, IndexError):
            continue
    return found


def cgroups(name):
    """Groups of VMs below groups whose name is `name`, in every hierarchy."""
    found = []
    for root, folders, _ in os.walk(CGROUPS):
        if os.path.basename(root) == name or f"/{name}/" in root + "/":
            found += [os.path.join(root, folder) for folder in folders if folder.startswith("vm_")]
    return found


def remove_cgroups(name):
    """Removes the empty parent groups that a test's node made; rmdir refuses what is not empty."""
    for top in [CGROUPS, *CGROUPS.iterdir()]:
        for root, _, _ in os.walk(top / name, topdown=False):
            try:
                os.rmdir(root)
            except OSError:
                continue


def children(folder):
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def leftovers(node):
    """Everything of the node's VMs that is still here, as text lines."""
    found = [f"process: {line}" for line in processes(node.uid_base)]
    found += [f"cgroup: {path}" for path in cgroups(node.cgroup_name)]
    found += [f"directory: {node.run_dir}/vm/{name}" for name in children(f"{node.run_dir}/vm")]
    found += [f"journal: {name}" for name in children(f"{node.state_dir}/journal")]
    return found
