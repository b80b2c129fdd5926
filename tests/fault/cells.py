"""The matrix, stated before anything runs: which cells there are, which cannot be and why, and with what end each may leave its run."""
import dataclasses

PROCESSES = ("vmm", "channel", "broker", "keeper", "link", "controld", "postgres")
STEPS = ("journal", "spawn", "hello", "start", "model", "command", "destroy", "finish", "settle")
STEP_TEXT = {
    "journal": "the host has journalled the run; it waits for a place to boot",
    "spawn": "VMM, channel and broker were started; the guest has not spoken",
    "hello": "the guest said hello; its broker has not taken it yet",
    "start": "the host asked for the start; the database has not committed it",
    "model": "the model was asked; its answer has not begun",
    "command": "a command runs in the guest",
    "destroy": "the VM is ordered to be destroyed; something of it does not go away yet",
    "finish": "the host reported the end; the database has not committed it",
    "settle": "the run has ended; the charge is not committed",
}
# kill, stop: of a process. cut: of the network between the host and controld, for 5 s, or for longer than the lease.
FAULTS = ("kill", "stop")
# Or stuck, for longer than the lease: the connection that is there says nothing any more, a new one would.
CUTS = ("reset-5s", "silent-5s", "reset-long", "silent-long", "stuck-long")

NOT_BORN = "before the spawn there is no such process"
LEFT = "the process has ended by then: {}"
IMPOSSIBLE = {
    ("vmm", "journal"): NOT_BORN, ("channel", "journal"): NOT_BORN, ("broker", "journal"): NOT_BORN,
    ("vmm", "finish"): LEFT.format("a VM is gone before its end is reported"), ("vmm", "settle"): LEFT.format("a VM is gone before its end is reported"),
    ("channel", "settle"): LEFT.format("an end that was taken ends them"), ("broker", "settle"): LEFT.format("an end that was taken ends them"),
}

GOOD = ("succeeded", None)
NO_START = ("failed", "vm_start_failed")
LOST = {"vmm": ("failed", "vm_crashed"), "channel": ("interrupted", "channel_lost"), "broker": ("interrupted", "broker_lost")}
FENCED = {("interrupted", "node_lost"), ("interrupted", "lease_expired")}

AT_WORK = ("model", "command")
UNSTARTED = ("journal", "spawn", "hello")


@dataclasses.dataclass(frozen=True)
class Cell:
    process: str  # one of PROCESSES, "network", "first" or "second" (of two controlds)
    step: str
    fault: str

    @property
    def name(self):
        return f"{self.process}/{self.step}/{self.fault}"

    @property
    def stack(self):
        """What kind of stack it needs: cells of one kind share one, in sequence."""
        if self.process == "network":
            return "short-lease" if self.fault.endswith("long") else "network"
        if self.process in ("first", "second"):
            return "short-pair" if self.fault == "stop" else "pair"  # it stands still for longer than the lease, which the other one renews
        return "plain"

    @property
    def impossible(self):
        return IMPOSSIBLE.get((self.process, self.step))


def legal(cell):
    """The set of (status, error code) that the cell's run may end with."""
    if cell.process == "network" and cell.fault in ("reset-long", "silent-long"):
        return legal_when_fenced(cell)
    return legal_when_killed(cell) if cell.fault == "kill" else legal_when_stopped(cell)


def legal_when_killed(cell):
    process, step = cell.process, cell.step
    if process in LOST:
        # On the only host that there is, a start that failed is the run's end.
        if step == "spawn" or (process, step) == ("broker", "hello"):
            return {NO_START}
        if step == "hello":
            return {NO_START, LOST[process]}  # the hello that waited is taken first, and the start may be granted before the death is heard of
        if step in ("start", *AT_WORK):
            return {LOST[process]}
        # What was decided stands, but a broker's result is only in the broker until it is reported.
        return {LOST["broker"]} if (process, step) == ("broker", "destroy") else {GOOD}
    # Keeper too: a run that has not started is queued again, and with any other its broker goes on until the next keeper is there.
    return {GOOD}


def legal_when_stopped(cell):
    # A guest has 30 s to say hello: a machine that stands still as long may be late, and that is told as what it is.
    if cell.process in ("vmm", "channel") and cell.step in ("spawn", "hello"):
        return {GOOD, NO_START}
    return {GOOD}


def legal_when_fenced(cell):
    """The network is away for longer than the lease: the VM dies on its host, and the run goes to whoever comes back."""
    if cell.step in UNSTARTED:
        return {GOOD}  # another attempt, on the same host
    if cell.step == "start":
        return FENCED  # granted, and then never heard of
    return {GOOD} if cell.step in ("finish", "settle") else FENCED


def all_cells():
    found = [Cell(process, step, fault) for fault in FAULTS for process in PROCESSES for step in STEPS]
    found += [Cell("network", step, cut) for cut in CUTS for step in STEPS]
    found += [Cell(which, step, "kill") for which in ("first", "second") for step in STEPS]
    found += [Cell(which, step, "stop") for which in ("first", "second") for step in ("start", *AT_WORK, "finish")]
    return found


# For the default run: cells that no other test of it covers, one for each kind of hold.
SHORT = [Cell("network", "command", "stuck-long"), Cell("keeper", "journal", "kill"), Cell("channel", "hello", "kill"), Cell("controld", "start", "kill"), Cell("broker", "destroy", "kill"),
         Cell("link", "finish", "kill"), Cell("postgres", "settle", "kill")]


def matching(words):
    """Cells by PROCESS/STEP/FAULT; any part may be * or be left out."""
    parts = (words or "").split("/")
    parts += ["*"] * (3 - len(parts))
    found = [c for c in all_cells() if all(want in ("", "*", have) for want, have in zip(parts, (c.process, c.step, c.fault)))]
    if not found or len(parts) > 3:
        raise SystemExit(f"no cell matches {words!r}: give PROCESS/STEP/FAULT, of {', '.join((*PROCESSES, 'network', 'first', 'second'))}; "
                         f"{', '.join(STEPS)}; {', '.join((*FAULTS, *CUTS))}")
    return found
