"""A private Postgres for tests: one cluster a test run, one database a test, copied from a migrated template.

The cluster lies below a short path (unix sockets end at 107 bytes), listens on nothing but its socket, runs as user `postgres`
when the tests are root, and has fsync off unless asked for. It never touches the system's own clusters. Databases belong to a role
that is no superuser, as in production.
"""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psycopg2

import wait

BIN = Path(os.environ.get("EPHEMERAL_PG_BIN", "/usr/lib/postgresql/15/bin"))
ROLE = "eph"


class Running:
    """A cluster that somebody else started: databases in it, by its socket's directory."""

    def __init__(self, socket_dir):
        self.socket_dir = str(socket_dir)

    def conninfo(self, database, user=ROLE):
        return f"host={self.socket_dir} dbname={database} user={user}"

    def admin(self, database="postgres"):
        db = psycopg2.connect(self.conninfo(database, "postgres"))
        db.autocommit = True
        return db

    def create(self, name, template="template0"):
        db = self.admin()
        db.cursor().execute(f'CREATE DATABASE "{name}" OWNER {ROLE} TEMPLATE "{template}"')
        db.close()
        return self.conninfo(name)

    def drop(self, name):
        db = self.admin()
        db.cursor().execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        db.close()

    def make_template(self, migrate, name="template_eph"):
        """migrate(conninfo) fills it; later database() copies it."""
        migrate(self.create(name))
        return name

    def database(self, template="template_eph"):
        """A new database; returns (name, conninfo)."""
        name = f"t_{secrets.token_hex(6)}"
        return name, self.create(name, template)


class Cluster(Running):
    """start() ... stop(); or a context manager."""

    def __init__(self, parent="/tmp", fsync=False, settings=None):
        self.dir = Path(tempfile.mkdtemp(prefix="eph-pg-", dir=parent))
        super().__init__(self.dir)
        self.data = self.dir / "data"
        self.log = self.dir / "log"
        self.fsync = fsync
        self.settings = settings or {}
        self.process = None
        self.user = None
        if os.geteuid() == 0:
            self.user = pwd.getpwnam("postgres")
            os.chown(self.dir, self.user.pw_uid, self.user.pw_gid)
        os.chmod(self.dir, 0o755)

    def _run_as(self):
        if not self.user:
            return {}
        return {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}

    def start(self):
        subprocess.run(
            [BIN / "initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"],
            check=True, stdout=subprocess.DEVNULL, cwd=self.dir, **self._run_as())
        settings = {
            "listen_addresses": "''", "unix_socket_directories": f"'{self.dir}'", "max_connections": "200",
            "shared_buffers": "64MB", "fsync": "on" if self.fsync else "off", "full_page_writes": "on" if self.fsync else "off",
            "synchronous_commit": "on" if self.fsync else "off", "max_wal_size": "1GB", "log_min_messages": "warning",
            "log_line_prefix": "'%m [%p] %d '", "timezone": "'UTC'", "max_locks_per_transaction": "256",
            **self.settings,
        }
        with open(self.data / "postgresql.conf", "a", encoding="utf-8") as f:
            for name, value in settings.items():
                f.write(f"{name} = {value}\n")
        self.start_server()
        with self.admin() as db:
            db.cursor().execute(f"CREATE ROLE {ROLE} LOGIN")
        return self

    def start_server(self):
        """Also after kill() or stop_server(), on the same data."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([BIN / "postgres", "-D", self.data], stdout=log, stderr=log, cwd=self.dir, **self._run_as())

        def answers():
            if self.process.poll() is not None:
                raise RuntimeError(f"postgres did not start: {self.log.read_text()[-2000:]}")
            try:
                psycopg2.connect(self.conninfo("postgres", "postgres")).close()
                return True
            except psycopg2.OperationalError:
                return False
        wait.until(answers, 60, "an answer from Postgres")

    def stop_server(self, how=signal.SIGINT):
        """SIGINT: fast shutdown. SIGQUIT: as after a crash."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(timeout=60)
        self.process = None

    def stop(self):
        self.stop_server(signal.SIGQUIT)
        shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc):
        self.stop()


def migrate_with_files(conninfo, folder=Path(__file__).resolve().parents[2] / "controld" / "migrations"):
    """The migrations straight from their files: for tests of SQL that need no binary."""
    db = psycopg2.connect(conninfo)
    for path in sorted(folder.glob("*.sql")):
        with db, db.cursor() as cursor:
            cursor.execute(path.read_text(encoding="utf-8"))
    db.close()


def set_clock_offset(conninfo, offset_ms):
    """Moves all of a test database's time (every session, from the next statement on)."""
    db = psycopg2.connect(conninfo)
    with db, db.cursor() as cursor:
        cursor.execute("CREATE OR REPLACE FUNCTION eph_clock_offset_ms() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE AS "
                       f"'SELECT {int(offset_ms)}::bigint'")
    db.close()
