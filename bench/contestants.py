"""Who takes part: this service with two timings, and its peers at stated versions in environments of their own."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from uv import find_uv_bin

from laboratory.environment import clean_environment
from laboratory.servers import Postgres, embedded_binaries
from laboratory.service import FENCED_WRITES, ROLES, Replica, install

from . import TEMPLATE

PEERS = Path(__file__).parent / "peers"
PREFIX = "ACME_BILLING_"
FAST = {"INTERVAL_SECONDS": "0.25", "TTL_SECONDS": "1.5", "STOP_GRACE_SECONDS": "0.5"}


@dataclass(frozen=True)
class Contestant:
    """One way to have a single leader.

    Args:
        command: what a replica is, as a process.
        roles: role in the record to name in the tables: a peer has one, this service an external and a fenced worker.
        url_settings: environment variables that get the database's URL.
        prepare: a command that makes its tables, with the same environment.
        restless: seconds of its longest period, over which the moment of the fault is spread.
    """

    name: str
    command: tuple[str, ...]
    roles: Mapping[str, str]
    url_settings: tuple[str, ...] = ("PEER_URL",)
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: tuple[str, ...] = ()
    restless: float = 1.0

    def _environment(self, url: str, directory: Path) -> dict[str, str]:
        settings = dict.fromkeys(self.url_settings, url)
        return clean_environment(RECORD_DIRECTORY=str(directory), **settings, **self.environment)

    def prepared(self, url: str, directory: Path) -> None:
        if self.prepare:
            environment = self._environment(url, directory)
            subprocess.run(self.prepare, env=environment, check=True, capture_output=True, timeout=60)

    def start(self, url: str, directory: Path, number: int, prefix: tuple[str, ...] = ()) -> Replica:
        path = directory / f"{number}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*prefix, *self.command],
                cwd=directory,
                env=self._environment(url, directory),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return Replica(process, path)


def uv(*arguments: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [find_uv_bin(), *arguments], cwd=cwd, env=clean_environment(), check=True, capture_output=True, text=True
    )
    return done.stdout


def bake(directory: Path, *answers: str) -> Path:
    """A project with the default answers but for these."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "cookiecutter",
        "--no-input",
        "--default-config",
        "-o",
        directory,
        TEMPLATE,
    ]
    subprocess.run([*command, *answers], env=clean_environment(), check=True, stdout=subprocess.DEVNULL)
    return directory / "acme_billing"


def service(directory: Path, name: str, timing: Mapping[str, str]) -> Contestant:
    """This service, generated with the default answers, with recording workers."""
    project = directory / "acme_billing"
    if not project.exists():
        install(bake(directory))
    command = str(project / ".venv" / "bin" / "acme-billing")
    roles = {"scheduler": f"this service, {name}, external", "poller": f"this service, {name}, fenced"}
    toggles = {f"{role.upper()}_ENABLED": "true" for role in ROLES}  # all three compete, two are in the tables
    settings = {"LOG_FORMAT": "json", **toggles, **timing}
    return Contestant(
        f"service-{name}",
        (command, "run"),
        roles,
        (f"{PREFIX}DATABASE_URL",),
        {f"{PREFIX}{key}": value for key, value in settings.items()} | {"RECORD_BEHAVIOUR": "good"},
        prepare=(command, "migrate"),
        restless=float(timing.get("INTERVAL_SECONDS", 1)),
    )


def environment_of(directory: Path, name: str, *packages: str) -> Path:
    """The interpreter of an environment with these packages, made on first use."""
    environment = directory / name
    python = environment / "bin" / "python"
    if not environment.exists():
        uv("venv", "-q", environment)
        uv("pip", "install", "-q", "-p", python, *packages)
    return python


def peer(directory: Path, name: str, script: str, *packages: str, restless: float) -> Contestant:
    """A peer, installed at its stated version."""
    python = str(environment_of(directory, name, *packages))
    command = (python, str(PEERS / f"{script}_peer.py"))
    installer = PEERS / f"{script}_install.py"
    prepare = (python, str(installer)) if installer.exists() else ()
    return Contestant(name, command, {"leader": name}, prepare=prepare, restless=restless)


PSYCOPG = "psycopg[binary]==3.3.9"
PEER_PACKAGES = ("asyncpg-lock==0.0.3", "pals==0.4.0", "sqlalchemy-dlock==0.9.0", "notifelect==0.0.3")


def versions() -> list[str]:
    """What takes part, with versions; the server is the one of the tests."""
    postgres = subprocess.run(
        [embedded_binaries() / "postgres", "--version"], capture_output=True, text=True, check=True
    )
    return [postgres.stdout.strip().replace("postgres (PostgreSQL)", "PostgreSQL"), *PEER_PACKAGES, PSYCOPG]


def contestants(directory: Path) -> list[Contestant]:
    """All of them, installed."""
    return [
        service(directory, "default timing", {}),
        service(directory, "fast timing", FAST),
        peer(directory, "asyncpg-lock", "asyncpg_lock", PEER_PACKAGES[0], restless=5),
        peer(directory, "pals", "pals", PEER_PACKAGES[1], PSYCOPG, restless=1),
        peer(directory, "sqlalchemy-dlock", "dlock", PEER_PACKAGES[2], PSYCOPG, restless=1),
        peer(directory, "notifelect", "notifelect", PEER_PACKAGES[3], restless=20),
        peer(directory, "row lease (15/10/2 s)", "row_lease", PSYCOPG, restless=2),
        peer(directory, "naive loop", "naive", PSYCOPG, restless=15),
    ]


def give_tables(contestant: Contestant, postgres: Postgres, directory: Path) -> None:
    """What its workers and its own code need in a fresh database."""
    contestant.prepared(postgres.url(), directory)
    with postgres.connect() as conn:
        conn.execute(FENCED_WRITES)


def end(replicas: list[Replica]) -> None:
    for replica in replicas:
        if replica.process.poll() is None:
            replica.process.kill()
        replica.process.wait()
