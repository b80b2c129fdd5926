"""One controld for a test: a database of its own in the run's cluster, bootstrapped and served for real, with the scripted provider, its
models and their prices. Organizations, keys and node tokens are made through the operator API, as an operator would."""
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import tempfile

import psycopg2
import requests

import client as client_rig
import wait

SANITIZER = {"ASAN_OPTIONS": "detect_leaks=1:abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}
CREDIT = 1_000_000_000


class Control:
    """Control(cluster, bin_dir, **config): config are controld's keys, over what a test wants by default."""

    def __init__(self, cluster, bin_dir, conninfo=None, start=True, scripted=True, **config):
        self.cluster, self.bin_dir = cluster, bin_dir
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="eph-control-", dir=os.environ.get("EPHEMERAL_TEST_TMP", "/tmp")))
        self.database = None
        if conninfo is None:
            self.database = f"t_{secrets.token_hex(6)}"
            conninfo = cluster.create(self.database)
        self.conninfo = conninfo
        token = self.home / "scripted-token"
        self.scripted_token = secrets.token_urlsafe(24)
        token.write_text(self.scripted_token + "\n")
        token.chmod(0o600)
        self.config = {"database": conninfo, "listen": "127.0.0.1:0", "operator_listen": "127.0.0.1:0", "link_listen": "127.0.0.1:0",
                       "metrics_listen": "127.0.0.1:0",
                       "scripted_listen": "127.0.0.1:0" if scripted else "", "scripted_token_file": token, "keyring": self.home / "keyring",
                       "tls_dir": self.home / "tls", "log_level": "debug", **config}
        self.log = self.home / "controld.log"
        self.process = None
        self.addresses = {}
        self.orgs = 0
        self.operator_session = requests.Session()
        self.operator_session.trust_env = False
        try:
            self.write_config()
            self.operator_key = self.bootstrap()["operator_key"]
            if start:
                self.start()
            if start and scripted:
                self.add_scripted()
        except BaseException:
            self.stop(signal.SIGKILL)
            self.remove()
            raise

    # --- the process ---------------------------------------------------------------------------------------------------------------

    def write_config(self, **changes):
        self.config.update(changes)
        self.file = self.home / "controld.conf"
        self.file.write_text("".join(f"{name} = {value}\n" for name, value in self.config.items() if value is not None))
        self.file.chmod(0o600)

    def command(self, *arguments, expect=0):
        """Runs a subcommand to its end and returns what it printed."""
        done = subprocess.run([f"{self.bin_dir}/controld", *arguments, "--config", self.file], capture_output=True, text=True, timeout=120,
                              env=dict(os.environ, **SANITIZER), check=False)
        assert done.returncode == expect, f"controld {arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def bootstrap(self, *more):
        return json.loads(self.command("bootstrap", "--json", *more))

    def check_ledger(self):
        """The lines of a full check; fails when one of its invariants does not hold."""
        return self.command("check-ledger", "--full").splitlines()

    def start(self, ready=True, prefix=()):
        read, write = os.pipe()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*prefix, f"{self.bin_dir}/controld", "serve", "--config", self.file, "--ready-fd", str(write)],
                                            pass_fds=[write], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env=dict(os.environ, **SANITIZER))
        os.close(write)
        with os.fdopen(read) as pipe:
            line = pipe.readline() if ready else ""
        if ready:
            assert line, f"controld did not start:\n{self.log_tail()}"
            self.addresses = json.loads(line)
        return self

    @property
    def url(self):
        return f"http://{self.addresses['api']}"

    @property
    def operator_url(self):
        return f"http://{self.addresses['operator']}"

    def keep_addresses(self):
        """A restart takes the same ports again: nodes and clients find it where it was."""
        self.write_config(listen=self.addresses["api"], operator_listen=self.addresses["operator"],
                          link_listen=re.sub(r"^.*//", "", self.addresses["link"]))
        if self.addresses.get("scripted"):
            self.write_config(scripted_listen=self.addresses["scripted"])

    def stop(self, how=signal.SIGTERM, seconds=30):
        code = 0
        if self.process and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(seconds)
        if self.process:
            code = self.process.returncode
        self.process = None
        return code

    def log_text(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines=60):
        return "\n".join(self.log_text().splitlines()[-lines:])

    def close(self):
        code = self.stop()
        text = self.log_text()
        keep = os.environ.get("EPHEMERAL_TEST_LOGS")
        if keep and self.log.exists():
            shutil.copy(self.log, f"{keep}/controld-{self.home.name}.log")
        self.remove()
        assert "ERROR: AddressSanitizer" not in text and "runtime error:" not in text and "ERROR: LeakSanitizer" not in text, text[-8000:]
        assert code == 0, f"controld ended with {code}:\n{text[-4000:]}"

    def remove(self):
        shutil.rmtree(self.home, ignore_errors=True)
        if self.database:
            self.cluster.drop(self.database)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    # --- the operator's API ----------------------------------------------------------------------------------------------------------

    def operator(self, method, path, expect=(200, 201, 204), key=None, **kwargs):
        kwargs.setdefault("timeout", 30)
        headers = {"Authorization": f"Bearer {key or self.operator_key}", **kwargs.pop("headers", {})}
        answer = self.operator_session.request(method, f"{self.operator_url}/v1/operator{path}", headers=headers, **kwargs)
        expect = (expect,) if isinstance(expect, int) else expect
        assert answer.status_code in expect, f"{method} {path}: {answer.status_code} {answer.text[:2000]}"
        return answer.json() if answer.content else None

    def add_scripted(self):
        """The scripted provider with a model that costs something (the default) and one that does not."""
        self.operator("PUT", "/providers/scripted", json={"base_url": f"http://{self.addresses['scripted']}/v1", "api_key": self.scripted_token,
                                                          "any_address": True})
        self.operator("PUT", "/models/scripted/auto", json={"default": True})
        self.operator("PUT", "/models/scripted/shell", json={})
        self.operator("PUT", "/prices/scripted/auto", json={"input_micros_per_million": 50_000, "output_micros_per_million": 400_000})
        self.operator("PUT", "/prices/scripted/shell", json={"input_micros_per_million": 0, "output_micros_per_million": 0})
        self.set_prices(compute_micros_per_million_ms=200_000)

    def set_prices(self, **prices):
        self.operator("PUT", "/prices", json=prices)

    def new_org(self, credit=CREDIT, name=None, allow_emulated=True, **fields):
        """Makes an organization with credit; returns its id."""
        self.orgs += 1
        body = {"name": name or f"org {self.orgs} {secrets.token_hex(3)}", "allow_emulated": allow_emulated, **fields}
        org = self.operator("POST", "/orgs", json=body)["id"]
        if credit:
            self.operator("POST", f"/orgs/{org}/credit", json={"amount_micros": credit, "note": "for a test"})
        return org

    def new_key(self, org, role="member", **fields):
        return self.operator("POST", f"/orgs/{org}/keys", json={"role": role, **fields})["key"]

    def new_client(self, role="member", org=None, **fields):
        """A client with a new key, of a new organization unless one is given."""
        org = org or self.new_org(**fields)
        made = client_rig.Client(self.url, self.new_key(org, role))
        made.org = org
        return made

    def credit(self, org, amount_micros, **kwargs):
        return self.operator("POST", f"/orgs/{org}/credit", json={"amount_micros": amount_micros}, **kwargs)

    # --- nodes -----------------------------------------------------------------------------------------------------------------------

    def node_token(self, **fields):
        return self.operator("POST", "/node-tokens", json={"uses": 1, "expires_in_seconds": 3600, "isolation": "kvm", **fields})["token"]

    def node(self, name):
        return next((n for n in self.operator("GET", "/nodes?limit=100")["data"] if n["name"] == name), None)

    def node_live(self, name):
        node = self.node(name)
        return node if node and node["live"] else None

    def act(self, name, action):
        return self.operator("POST", f"/nodes/{self.node(name)['id']}/{action}")

    def drain(self, name):
        return self.act(name, "drain")

    def undrain(self, name):
        return self.act(name, "undrain")

    def revoke(self, name):
        return self.act(name, "revoke")

    # --- looking into the database ---------------------------------------------------------------------------------------------------

    def query(self, sql, *values):
        db = psycopg2.connect(self.conninfo)
        try:
            with db, db.cursor() as cursor:
                cursor.execute(sql, values)
                return cursor.fetchall() if cursor.description else []
        finally:
            db.close()

    def event_rows(self, run_id):
        """(seq, bytes, hash) of a run's events as stored."""
        return [(seq, bytes(data), bytes(digest)) for seq, data, digest in
                self.query("SELECT seq, bytes, hash FROM events WHERE run_id = %s ORDER BY seq", run_id)]

    def guests_booted(self):
        """Guests that reached their agent: each wrote microvm.ready once."""
        return self.query("SELECT count(*) FROM events WHERE type = 'microvm.ready'")[0][0]

    def until_ready(self, seconds=20):
        return wait.until(lambda: requests.get(f"{self.url}/readyz", timeout=5).status_code == 200, seconds, "controld to be ready")
