"""Runs that are alive for long, as many at a time as a test wants, each checked when it ends."""
import collections
import random
import re
import secrets

import wait
from client import ENDS, output_of, say, shell, turns

SECONDS = (15, 45)  # that a run is alive, when nothing happens to it
TICK = "i=0; while [ $i -lt {count} ]; do i=$((i + 1)); echo tick $i {nonce}; sleep 1; done"

Kill = collections.namedtuple("Kill", "whom alive seconds")  # alive: ids of runs that it might have harmed; seconds: until it worked again


def reconciled(node):
    """What reconcile found in each of its looks since the node was first started; waits for one more look."""
    def looks():
        return [int(finds) for finds in re.findall(r" reconciled finds=(\d+)", node.log.read_text(errors="replace"))]
    before = len(looks())
    return wait.until(lambda: looks() if len(looks()) > before else None, 60, "reconcile to look")


class Crowd:
    """Crowd(fleet, client, want): fill() brings it to `want` runs, tend() checks those that ended."""

    def __init__(self, fleet, client, want, seed=1):
        self.fleet, self.client, self.want, self.dice = fleet, client, want, random.Random(seed)
        self.live, self.ended, self.expected = set(), {}, {}
        self.kills = []

    # --- runs ----------------------------------------------------------------------------------------------------------------------

    def create(self):
        nonce, seconds = secrets.token_hex(6), self.dice.randint(*SECONDS)
        kind = self.dice.choice(("command", "ticks", "model"))
        if kind == "command":
            script, output = [shell(f"echo begun {nonce}; sleep {seconds}; echo ended")], f"begun {nonce}\nended\n"
        elif kind == "ticks":
            script = [shell(TICK.format(count=seconds, nonce=nonce))]
            output = "".join(f"tick {n} {nonce}\n" for n in range(1, seconds + 1))
        else:
            script, output = [shell(f"echo {nonce}")], f"{nonce}\n"
        made = self.client.create(prompt=turns(*script, say(f"end {nonce}", late=seconds if kind == "model" else 0)), size="small", timeout_seconds=300)["id"]
        self.live.add(made)
        self.expected[made] = (output, f"end {nonce}")

    def fill(self):
        while len(self.live) < self.want:
            self.create()

    def tend(self):
        """Checks runs that have ended; returns how many there are."""
        states = dict(self.fleet.serving.query("SELECT run_id, status FROM runs WHERE run_id = ANY (%s)", list(self.live)))
        for run_id in [r for r, status in states.items() if status in ENDS]:
            self.check(run_id)
        return len(self.ended)

    def check(self, run_id, seconds=120):
        run = self.client.settled(run_id, seconds)
        self.live.discard(run_id)
        self.ended[run_id] = run
        events = self.fleet.check(run)
        if run["status"] == "succeeded":
            output, said = self.expected[run_id]
            assert output_of(events) == output and run["output"] == said, (run_id, output_of(events), run["output"])

    def alive(self):
        """Ids of runs whose worker has started and that have not ended."""
        return {row[0] for row in self.fleet.serving.query("SELECT run_id FROM run_live WHERE state = 'running'")}

    def until_alive(self, least, seconds=240):
        """Ids of runs that are alive, when they are as many."""
        def enough():
            self.tend()
            self.fill()
            alive = self.alive()
            return alive if len(alive) >= least else None
        return wait.until(enough, seconds, f"{least} runs to be alive", every=0.2)

    def finish(self, seconds=240):
        """To the end of every run."""
        for run_id in list(self.live):
            self.check(run_id, seconds)

    # --- figures -------------------------------------------------------------------------------------------------------------------

    def ends(self):
        return collections.Counter(run["status"] + (f" {run['error']['code']}" if run["error"] else "") for run in self.ended.values())

    def survived(self, kills):
        """(runs alive at these kills, those of them that succeeded); a run that was alive at two counts twice."""
        alive = [run_id for kill in kills for run_id in kill.alive]
        return len(alive), sum(self.ended[run_id]["status"] == "succeeded" for run_id in alive)

    def rows(self):
        """A line for each process that was killed."""
        lines = [f"{'killed':10} {'times':>5} {'alive':>6} {'least':>5} {'succeeded':>9} {'works again s, median':>22} {'max':>6}"]
        for whom in dict.fromkeys(kill.whom for kill in self.kills):
            kills = [kill for kill in self.kills if kill.whom == whom]
            alive, good = self.survived(kills)
            times = sorted(kill.seconds for kill in kills)
            lines.append(f"{whom:10} {len(kills):5} {alive:6} {min(len(k.alive) for k in kills):5} {good:9} {times[len(times) // 2]:22.1f} {times[-1]:6.1f}")
        return [*lines, f"{len(self.ended)} runs: " + ", ".join(f"{n} {end}" for end, n in self.ends().most_common())]
