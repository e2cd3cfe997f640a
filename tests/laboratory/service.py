"""A baked project, installed for real, whose workers record what they do; and its replicas as processes."""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psycopg
from uv import find_uv_bin

from . import record, recorders
from .environment import clean_environment
from .servers import Postgres, wait_until

SLUG = "acme_billing"
PREFIX = "ACME_BILLING_"
ROLES = ("poller", "scheduler", "reconciler")
BODIES = {"poller": recorders.FENCED, "scheduler": recorders.EXTERNAL, "reconciler": recorders.ASYNC_EXTERNAL}

#: Quicker than the defaults, and slow enough for two busy cores: trust 1.25 s, kill 2.25 s, horizon 2.375 s.
QUICK = {"INTERVAL_SECONDS": "0.5", "TTL_SECONDS": "3", "STOP_GRACE_SECONDS": "1"}

#: The table that fenced recorders write to.
FENCED_WRITES = """
create table if not exists public.fenced_writes
    (id bigserial primary key, epoch bigint not null, instance text not null)
"""


@dataclass(frozen=True)
class Service:
    """An installed project."""

    project: Path

    @property
    def command(self) -> Path:
        return self.project / ".venv" / "bin" / "acme-billing"

    def call(self, *arguments: str, url: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one of its commands to the end."""
        return subprocess.run(
            [self.command, *arguments],
            cwd=self.project,
            env=clean_environment() | {f"{PREFIX}DATABASE_URL": url} | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def prepare(self, postgres: Postgres) -> None:
        """Migrate a database and give it the table that fenced recorders write to."""
        done = self.call("migrate", url=postgres.url())
        assert done.returncode == 0, done.stderr
        with postgres.connect() as conn:
            conn.execute(FENCED_WRITES)


def install(bake: Path, bodies: Mapping[str, str] = BODIES) -> Service:
    """Give a baked project recording workers, or those of `bodies`, and install it with all its extras."""
    for role, body in bodies.items():
        package = bake / "workers" / role / "src" / f"{SLUG}_{role}"
        shutil.rmtree(package)
        package.mkdir()
        (package / "__init__.py").write_text(body.replace("@SLUG@", SLUG))
    command = [find_uv_bin(), "sync", "--all-extras", "--no-dev", "--quiet"]
    subprocess.run(command, cwd=bake, env=clean_environment(), check=True, timeout=300)
    return Service(bake)


@dataclass
class Replica:
    """One `run` process."""

    process: subprocess.Popen[bytes]
    log_path: Path
    paused: bool = False
    asked: bool = False  # to stop; a second signal would end it at once

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for_first_words(self) -> None:
        """Until it has said something: before that it may not listen for signals yet."""
        wait_until(lambda: self.log or self.process.poll() is not None, 15, "a replica has begun")

    def signal(self, number: signal.Signals, *, other_thread: bool = False) -> None:
        """To the process; or to a thread of it that is not the main one."""
        if other_thread:
            assert ctypes.CDLL(None).tgkill(self.pid, self._other_thread(), number) == 0
        else:
            self.process.send_signal(number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self.paused = number is signal.SIGSTOP
        self.asked = self.asked or number in (signal.SIGTERM, signal.SIGINT)
        if self.paused:  # until the last of its threads stands still
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _other_thread(self) -> int:
        """A thread that takes signals: the watchdog of faulthandler, renewed with each heartbeat, takes none."""
        for path in Path(f"/proc/{self.pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):  # it has ended
                fields = dict(line.split(":\t", 1) for line in path.read_text().splitlines())
                if int(fields["Pid"]) != self.pid and int(fields["SigBlk"], 16) == 0:
                    return int(fields["Pid"])
        raise AssertionError("there is no other thread")


@dataclass
class Fleet:
    """Replicas of one service in one trial, and the record of what their workers did."""

    service: Service
    postgres: Postgres
    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="trial-")))
    replicas: list[Replica] = field(default_factory=list)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self.replicas:
            if replica.process.poll() is None:
                replica.process.kill()
            replica.process.wait()
        shutil.rmtree(self.directory)

    def start(
        self,
        count: int = 1,
        *,
        url: str | None = None,
        roles: tuple[str, ...] = ROLES,
        prefix: tuple[str, ...] = (),
        environment: Mapping[str, str] = QUICK,
        behaviour: str = "good",
        output: int | None = None,
    ) -> list[Replica]:
        """Start replicas.

        `environment` goes without the service's prefix, `prefix` is a command to run them under, `behaviour` the name
        of a function of `recorders.EXTERNAL` for the scheduler to run, `output` a descriptor to take the log's place.
        """
        started = []
        for _ in range(count):
            path = self.directory / f"{len(self.replicas)}.log"
            settings = {
                "DATABASE_URL": self.postgres.url(),
                "LEASE_DATABASE_URL": url or self.postgres.url(),
                "LOG_FORMAT": "json",
                "OPS_LISTEN": "127.0.0.1:0",
                **{f"{role.upper()}_ENABLED": "true" for role in roles},
                **environment,
            }
            with path.open("wb") as log:
                process = subprocess.Popen(
                    [*prefix, str(self.service.command), "run"],
                    cwd=self.directory,
                    env=clean_environment()
                    | {"RECORD_DIRECTORY": str(self.directory), "RECORD_BEHAVIOUR": behaviour}
                    | {f"{PREFIX}{name}": value for name, value in settings.items()},
                    stdin=subprocess.DEVNULL,
                    stdout=output or log,
                    stderr=output or log,
                    start_new_session=True,
                )
            started.append(Replica(process, path))
            self.replicas.append(started[-1])
        return started

    def report(self) -> record.Report:
        return record.read(self.directory)

    def leader(self, role: str) -> Replica | None:
        """Who worked in a role within the last tenth of a second, and has not ended since."""
        now = time.monotonic()
        for term in self.report().terms.get(role, []):
            if now - term.last < 0.1:
                return next((replica for replica in self.alive() if replica.pid == term.pid), None)
        return None

    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.process.poll() is None]

    def wait_for_leader(self, role: str, timeout: float = 15, *, other_than: Replica | None = None) -> Replica:
        """Wait until somebody (else) works in a role."""

        def leads() -> Replica | None:
            found = self.leader(role)
            return found if found is not other_than else None

        leader: Replica = wait_until(leads, timeout, lambda: f"somebody works as {role}; logs: {self.logs()[-4000:]}")
        return leader

    def wait_for_leaders(self) -> dict[str, Replica]:
        """Wait until somebody works in each role."""
        return {role: self.wait_for_leader(role) for role in ROLES}

    def line_up(
        self,
        standbys: int = 1,
        *,
        behaviour: str = "good",
        roles: tuple[str, ...] = ROLES,
        environment: Mapping[str, str] = QUICK,
    ) -> list[Replica]:
        """Start what is missing to have one leader of all roles, who comes first, and so many stand-bys."""
        alive = self.alive() or self.start(roles=roles, environment=environment, behaviour=behaviour)
        leader = self.wait_for_leader(roles[0])
        missing = standbys + 1 - len(alive)
        others = [replica for replica in alive if replica is not leader]
        others += self.start(missing, roles=roles, environment=environment)
        for standby in others:
            self.wait_for_log("lease.standby", standby)
        for role in roles:
            assert self.wait_for_leader(role) is leader
        return [leader, *others]

    def gap_after(self, role: str, at: float, timeout: float = 15) -> float:
        """Wait until a term that began after a moment does its work; seconds without work before it."""

        def works() -> bool:
            after = [term for term in self.report().terms.get(role, []) if term.first > at]
            return bool(after) and after[0].units >= 3

        wait_until(works, timeout, lambda: f"somebody works as {role} again; logs: {self.logs()[-4000:]}")
        return self.report().gap(role, at)

    def succession(self, victim: Replica, at: float, timeout: float = 15) -> dict[str, float]:
        """Wait until others work in all roles that a replica had at a moment; seconds without work for each role."""
        before = {role: [t for t in terms if t.first <= at][-1:] for role, terms in self.report().terms.items()}
        roles = [role for role, terms in before.items() if terms and terms[0].pid == victim.pid]
        assert roles, "the victim led nothing"
        return {role: self.gap_after(role, at, timeout) for role in roles}

    def record_death(self, replica: Replica, role: str, timeout: float = 15) -> float:
        """Wait for a process's end, and have its work in a role count up to that moment, which is returned."""
        descriptor = os.pidfd_open(replica.pid)
        try:
            ready, _, _ = select.select([descriptor], [], [], timeout)
            died_at = time.monotonic()
        finally:
            os.close(descriptor)
        assert ready, f"not within {timeout:g} s: the process ends; its log: {replica.log[-4000:]}"
        newest = max(self.directory.glob(f"{role}.{replica.pid}.*.record"), key=lambda path: path.stat().st_mtime)
        with newest.open("a") as file:
            file.write(f"\n{died_at:.6f} {died_at:.6f} .\n")
        return died_at

    def wait_for_log(self, text: str, replica: Replica | None = None, timeout: float = 15) -> None:
        where = replica or self
        wait_until(
            lambda: text in (where.log if isinstance(where, Replica) else where.logs()), timeout, f"{text!r} is logged"
        )

    def logs(self) -> str:
        return "\n".join(f"--- {replica.pid}\n{replica.log}" for replica in self.replicas)

    def stop(self) -> list[int]:
        """SIGTERM to all; their exit codes."""
        for replica in self.alive():
            if replica.paused:
                replica.signal(signal.SIGCONT)
            replica.wait_for_first_words()
        for replica in self.alive():  # at once, or those who are asked last may lead for an instant
            if not replica.asked:
                replica.signal(signal.SIGTERM)
        return [replica.process.wait(40) for replica in self.replicas]

    def assert_safe(self) -> record.Report:
        """No two at once, rising epochs, and no write from an older epoch after a newer one."""
        report = self.report()
        report.assert_safe()
        with self.postgres.connect() as conn:
            stale = conn.execute(
                "select count(*) from (select epoch, max(epoch) over (order by id) as newest from public.fenced_writes)"
                " as w where epoch < newest"
            ).fetchone()
        assert stale == (0,), f"{stale} writes of an older epoch after a newer one"
        return report

    def heartbeats(self) -> set[tuple[int, object]]:
        """The lease sessions that the server knows, each with the time of its last heartbeat."""
        with self.postgres.connect() as conn:
            return set(
                conn.execute(
                    "select pid, state_change from pg_stat_activity where starts_with(application_name, %s)"
                    " and state = 'idle' and datname = current_database()",
                    [f"{SLUG} "],
                ).fetchall()
            )

    def wait_for_heartbeats(self, times: int = 1, sessions: int | None = None) -> None:
        """Wait until all lease sessions, or so many, have renewed so many times more."""

        def renewed(before: set[tuple[int, object]]) -> bool:
            return len(self.heartbeats() - before) >= (sessions or len(before))

        for _ in range(times):
            wait_until(partial(renewed, self.heartbeats()), 5, "heartbeats reach the server")

    def holders(self) -> dict[str, int]:
        """Who holds which lock, by the server's own account: role to backend pid."""
        with psycopg.connect(self.postgres.url(), autocommit=True) as conn:
            rows = conn.execute(
                "select role, l.pid from acme_billing.lease join pg_locks l on l.objid::bigint = lease.key"
                " where l.locktype = 'advisory' and l.granted"
                " and l.database = (select oid from pg_database where datname = current_database())"
            ).fetchall()
        return dict(rows)
