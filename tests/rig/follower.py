"""A client that watches a run as a browser does: it reads the stream, and goes on by Last-Event-ID whenever the stream breaks."""
import threading

import requests

import wait


class Follower(threading.Thread):
    """Follows a run to its settled end; check() then says whether every event came exactly once and unchanged."""

    def __init__(self, client, run_id, seconds=120):
        super().__init__(daemon=True)
        self.client, self.run_id, self.seconds = client.__class__(client.url, client.key), run_id, seconds
        self.seen, self.breaks, self.given_up = [], 0, ""
        self.start()

    def run(self):
        def read():
            try:
                for item in self.client.stream(self.run_id, self.seen[-1][0] if self.seen else None):
                    self.seen.append(item)
            except (requests.RequestException, AssertionError):
                self.breaks += 1
            return self.seen and self.seen[-1][1] == "run.settled"
        try:
            wait.until(read, self.seconds, "the end of the stream", every=0.1)
        except AssertionError as error:
            self.given_up = str(error)

    def check(self, control):
        self.join(60)
        assert not self.is_alive() and not self.given_up, f"the stream did not end: {[kind for _, kind, _ in self.seen]}"
        rows = [(seq, data) for seq, data, _ in control.event_rows(self.run_id)]
        assert [(seq, data) for seq, _, data in self.seen] == rows, "an event was lost, doubled or changed on its way"
