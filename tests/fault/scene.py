"""One cell, played: a run is brought to a step and held there, the fault is done and undone, and then everything that must hold is looked at."""
import os
import signal

from cells import CUTS, GOOD, legal
from check import check_fresh, check_run
from stack import BusyDirectory, DatabaseHold, Frozen, HelloWaits, Processes

import wait
from client import say, shell, turns
from follower import Follower

STOP_SECONDS, CUT_SECONDS = 30, {"5s": 5, "long": 14}  # long: above lease, grace and a sweep of a stack with the short lease
COMMAND = "echo begun; sleep 1; echo ended"
SCRIPT = (shell(COMMAND), say("the last word"))


class Scene:
    def __init__(self, stack, cell):
        self.stack, self.cell = stack, cell
        self.client = stack.client()
        self.log_from = stack.log_size()
        self.holds = []      # released when the fault has begun
        self.late = []       # released when it is over
        self.run_id = None
        self.runs = {}       # run id -> (Follower, set of legal ends)

    def create(self, script, ends):
        made = self.client.create(prompt=turns(*script))["id"]
        self.runs[made] = (Follower(self.client, made, 240), ends)
        return made

    def begin(self):
        self.run_id = self.create(SCRIPT, legal(self.cell))

    def logged(self, text):
        """The first line of the host's log about the run that holds the text; channel does not know its run."""
        marks = (f"run={self.run_id} ", "noded/channel: ")
        return next((line for line in self.stack.log_since(self.log_from).splitlines() if text in line and any(mark in line for mark in marks)), None)

    def vm(self):
        return self.logged("admitted").split(" vm=")[1].split()[0]

    def hold(self, held):
        (self.late if self.stands_still_with(held) else self.holds).append(held)
        return held

    def stands_still_with(self, held):
        """A hold that the stopped process itself keeps, or is kept by, ends with the stop."""
        process = self.cell.process
        return (isinstance(held, HelloWaits) and process == held.role) or (isinstance(held, DatabaseHold) and process == "postgres")

    def release(self, holds):
        while holds:
            holds.pop().release()

    # --- the steps -----------------------------------------------------------------------------------------------------------------

    def at_journal(self):
        """The only place to boot is taken by another run, whose VMM stands still."""
        self.create([say("the run before it")], {GOOD})
        pids = wait.until(lambda: self.stack.pids("vmm"), 60, "the VMM of the run before it", every=0.005)
        self.hold(Frozen(Processes(pids)))
        self.begin()
        wait.until(lambda: self.logged("admitted"), 30, "the run to be journalled")

    def at_spawn(self):
        self.begin()
        vmm = wait.until(lambda: self.stack.pids("vmm"), 60, "a VMM", every=0.005)
        if self.cell.process != "vmm":
            self.hold(Frozen(Processes(vmm)))
        wait.until(lambda: self.logged("to=boot"), 30, "the broker to have its assignment", every=0.005)

    def at_hello(self):
        self.begin()
        held = self.hold(HelloWaits("channel" if self.stack.kind == "short-lease" else "broker", self.stack, self.logged))
        wait.until(held.reached, 90, "the guest's hello in its reader's socket")

    def at_database(self):
        held = self.hold(DatabaseHold(self.stack, self.cell.step))
        self.begin()
        wait.until(held.reached, 90, f"the statement of {self.cell.step}")

    def ask_model(self):
        self.begin()
        reached = self.stack.provider.hold(self.run_id)
        wait.until(reached.is_set, 120, "the call of the model")

    def at_model(self):
        self.ask_model()
        self.hold(ModelHold(self.stack.provider, self.run_id))

    def at_command(self):
        self.begin()
        self.client.event(self.run_id, "shell.output", 120)

    def at_destroy(self):
        self.ask_model()
        if self.cell.process == "vmm":
            # It lives until keeper obeys: keeper stands still while the broker decides.
            self.hold(Frozen(Processes(self.stack.pids("keeper"))))
            self.stack.provider.release(self.run_id)
            wait.until(lambda: self.logged("to=destroy"), 60, "the order to destroy", every=0.005)
            return
        self.hold(BusyDirectory(self.stack, self.vm()))
        self.stack.provider.release(self.run_id)
        wait.until(lambda: not self.stack.pids("vmm"), 60, "the VMM to be dead")

    def to_step(self):
        step = self.cell.step
        if step in ("start", "finish", "settle"):
            self.at_database()
        else:
            getattr(self, f"at_{step}")()

    # --- the faults ----------------------------------------------------------------------------------------------------------------

    def victims(self):
        return Processes(wait.until(lambda: self.stack.pids(self.cell.process), 15, f"a process of {self.cell.process}", every=0.005))

    def kill(self):
        victims = self.victims()
        victims.send(signal.SIGKILL)
        process = self.cell.process
        if process == "keeper":
            self.stack.node.stop(signal.SIGKILL)
            if self.cell.step == "journal":
                # As if it had been killed right after the journal's entry, before the run's record was made.
                os.unlink(f"{self.stack.node.state_dir}/spool/{self.vm()}")
        elif process == "postgres":
            self.stack.cluster.stop_server(signal.SIGKILL)
        elif process in ("controld", "first", "second"):
            self.stack.controld(process).stop(signal.SIGKILL)
        wait.until(victims.gone, 20, f"{process} to be dead")
        victims.close()
        self.release(self.holds)
        self.release(self.late)
        self.heal()

    def heal(self):
        process = self.cell.process
        if process == "keeper":
            self.stack.node.start()
        elif process == "postgres":
            self.stack.cluster.start_server()
            self.stack.control.until_ready()
        elif process in ("controld", "first", "second"):
            self.stack.controld(process).start()

    def stop(self):
        victims = self.victims()
        victims.send(signal.SIGSTOP)
        try:
            wait.until(victims.stopped, 10, f"{self.cell.process} to stand still")
            self.release(self.holds)
            wait.fault_lasts(STOP_SECONDS)
        finally:
            victims.send(signal.SIGCONT)
            victims.close()
            self.release(self.late)

    def cut(self):
        mode, length = self.cell.fault.split("-")
        self.stack.proxy.cut(mode)
        try:
            self.release(self.holds)
            wait.fault_lasts(CUT_SECONDS[length])
        finally:
            self.stack.proxy.mend()

    def play(self):
        """Returns the end of the run as text; raises where something does not hold."""
        try:
            self.to_step()
            if self.cell.fault in CUTS:
                self.cut()
            else:
                getattr(self, self.cell.fault)()
        finally:
            self.release(self.holds)
            self.release(self.late)
            self.stack.provider.release(self.run_id)
        said = ""
        for run_id, (follower, ends) in self.runs.items():
            run = check_run(self, run_id, follower, ends)
            said = f"{run['status']}{' ' + run['error']['code'] if run['error'] else ''}" if run_id == self.run_id else said
        self.stack.node.clean(40)
        check_fresh(self)
        self.stack.node.clean(40)
        self.stack.control.check_ledger()
        return said

    def story(self):
        """What there is to read when a cell failed."""
        parts = []
        for run_id in self.runs:
            try:
                run = self.client.read(run_id)
                parts.append(f"{run_id}: {run['status']} {run['error']}")
                parts += [bytes(data).decode()[:400] for _, data, _ in self.stack.control.event_rows(run_id)]
                parts.append(f"provider: {self.stack.provider.tally(run_id)}")
            except Exception as error:  # noqa: BLE001 - the stack may be in any state
                parts.append(f"{run_id}: {error!r}")
        parts += ["", "--- noded", self.stack.log_since(self.log_from)[-60000:], "--- controld", self.stack.control.log_tail(300)]
        return "\n".join(parts)


class ModelHold:
    def __init__(self, provider, run_id):
        self.provider, self.run_id = provider, run_id

    def release(self):
        self.provider.release(self.run_id)


