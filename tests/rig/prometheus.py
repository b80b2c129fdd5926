"""A real Prometheus on loopback for a test: its own configuration, data and log; the deployment's alert rules, with their waits cut short."""
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile

import requests

import wait

RULES = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "rules.yml"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def shortened(text, changes):
    """The rules with every `for` a second and every window 30 s, and the given (old, new) texts exchanged, each of which must be there."""
    text = re.sub(r"\n        for: \w+", "\n        for: 1s", text)
    text = re.sub(r"\[\d+[mh]\]", "[30s]", text)
    text = re.sub(r"offset \d+m", "offset 30s", text)
    for old, new in changes:
        assert old in text, f"the rules have no {old!r}"
        text = text.replace(old, new)
    return text


class Prometheus:
    def __init__(self, targets, changes=()):
        """targets: {job: [address, ...]}"""
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="eph-prometheus-", dir=os.environ.get("EPHEMERAL_TEST_TMP", "/tmp")))
        (self.home / "rules.yml").write_text(shortened(RULES.read_text(), changes))
        jobs = "".join(f"  - job_name: {job}\n    static_configs: [{{targets: {list(addresses)}}}]\n" for job, addresses in targets.items())
        (self.home / "prometheus.yml").write_text("global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
                                                  f"rule_files: [rules.yml]\nscrape_configs:\n{jobs}")
        self.session = requests.Session()
        self.session.trust_env = False
        self.address = f"127.0.0.1:{free_port()}"
        with open(self.home / "log", "wb") as log:
            self.process = subprocess.Popen(["prometheus", f"--config.file={self.home}/prometheus.yml", f"--storage.tsdb.path={self.home}/data",
                                             f"--web.listen-address={self.address}", "--log.level=info"], stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, env=dict(os.environ, GOMAXPROCS="1"))
        try:
            wait.until(self.is_ready, 60, "Prometheus to be ready")
        except AssertionError as error:
            text = (self.home / "log").read_text(errors="replace")
            self.close()
            raise AssertionError(f"{error}\n{text[-2000:]}") from error

    def is_ready(self):
        assert self.process.poll() is None, "Prometheus ended"
        try:
            return self.session.get(f"http://{self.address}/-/ready", timeout=5).status_code == 200
        except requests.ConnectionError:
            return False

    def get(self, path, **params):
        answer = self.session.get(f"http://{self.address}/api/v1/{path}", params=params, timeout=10).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def firing(self):
        """{(alertname, instance or "")} of the alerts that fire, from the alerts API."""
        alerts = self.get("alerts")["alerts"]
        return {(a["labels"]["alertname"].removeprefix("Ephemeral"), a["labels"].get("instance", "")) for a in alerts if a["state"] == "firing"}

    def targets_up(self):
        return {t["scrapeUrl"].split("/")[2]: t["health"] for t in self.get("targets")["activeTargets"]}

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
