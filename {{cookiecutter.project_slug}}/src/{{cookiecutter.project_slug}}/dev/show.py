"""Several replicas on one screen: who leads, what to kill, who takes over."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

from .. import gates, schema
from ..config import ConfigError, Settings, load_settings
from ..keys import DISTRIBUTION, ENV_PREFIX, SERVICE
from ..operate.database import Unreachable, database
from ..operate.status import State, read_status
from ..supervisor import EXIT_CONFIG, StopSignals
from .postgres import throwaway_postgres

RESTART_SECONDS = 3.0  # as a process manager would, after the others had time to take over
LOOK_SECONDS = 0.1
COLOURS = ("36", "35", "33", "34", "32")

# A replica lives no longer than our end of its standard input, and its pid is the one that we started. The group is
# signalled, not the pid: once the replica is gone and its number another's, only the watcher is left in the group.
_LIFE_OF_A_REPLICA = """
exec 3<&0
{ read -r _ <&3; kill -TERM 0; } >/dev/null 2>&1 &
exec "$@" 3<&- </dev/null
"""

_one_line_at_a_time = threading.Lock()


def show(count: int) -> int:
    """Run replicas with all installed workers on until told to stop, and say who leads; returns the exit code.

    Without a configured database it brings its own. Leaves no process, lock or file behind, however it ends.

    Raises:
        ConfigError: no worker is installed, or a setting or toggle is wrong.
        Unreachable: the configured database gives no answer.
    """
    with StopSignals() as stop, ExitStack() as stack:
        settings = load_settings()
        known = [gate for gate in gates.evaluate() if gate.key]
        roles = [gate.role for gate in known if gate.installed]
        if not roles:
            raise ConfigError("no worker is installed, so there is nothing to lead; run: uv sync --all-extras")
        if missing := [gate.role for gate in known if not gate.installed]:
            say(f"Not installed, so not shown: {listed(missing)}. To install all there are: uv sync --all-extras")
        os.environ.update({f"{ENV_PREFIX}{gates.toggle_name(role)}": "true" for role in roles})
        if refused := [gate.reason for gate in gates.evaluate() if gate.state is gates.State.REFUSED]:
            raise ConfigError("\n".join(refused))
        if settings.database_url is None and settings.lease_database_url is None:
            say("No database is configured: starting a PostgreSQL that lives as long as this command.")
            url = os.environ[f"{ENV_PREFIX}DATABASE_URL"] = stack.enter_context(throwaway_postgres())
            settings = load_settings()
            say("To look from a second terminal:")
            say(f"    {ENV_PREFIX}DATABASE_URL='{url}' uv run {DISTRIBUTION} status --watch")
        with database(settings.work_url) as conn:
            schema.migrate(conn)
        return 0 if stop.received else Show(settings, roles, count).run(stop)


class Replica:
    """One replica: a child process that is started again when it dies."""

    def __init__(self, number: int) -> None:
        self.name = f"replica {number}"
        self._colour = COLOURS[(number - 1) % len(COLOURS)]
        self.start()

    def start(self) -> None:
        self.died_at: float | None = None
        self.process = subprocess.Popen(
            ["sh", "-c", _LIFE_OF_A_REPLICA, "sh", sys.executable, "-m", SERVICE, "run"],
            env={
                **os.environ,
                f"{ENV_PREFIX}LOG_FORMAT": "console",
                f"{ENV_PREFIX}OPS_LISTEN": "127.0.0.1:0",  # a free one each; the log tells the address of the page
                "PYTHONUNBUFFERED": "1",
                "FORCE_COLOR" if colourful() else "NO_COLOR": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the terminal's Ctrl-C is for us: we ask each replica to stop, once
        )
        self._reader = threading.Thread(target=self._pass_on, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _pass_on(self, lines: Iterable[str]) -> None:
        for line in lines:
            say(line.rstrip(), self.name, self._colour)

    def died(self) -> bool:
        """Whether it has died since the last look."""
        if self.died_at is not None or self.process.poll() is None:
            return False
        self.died_at = time.monotonic()
        self.ask_to_stop()
        return True

    def ask_to_stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def join(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join()


class Show:
    """Replicas, and what there is to say about them."""

    def __init__(self, settings: Settings, roles: list[str], count: int) -> None:
        self._settings = settings
        say(f"Starting {count} replica{'s' if count > 1 else ''} with {listed(roles)} turned on. Ctrl-C ends it all.")
        self._replicas = [Replica(number + 1) for number in range(count)]
        self._seen: dict[str, str] = {}
        self._told: dict[str, str] = {}
        self._died_at: dict[str, float] = {}

    def run(self, stop: StopSignals) -> int:
        """Show until told to stop, or until a replica finds its configuration wrong; returns the exit code."""
        try:
            while stop.received is None:
                with suppress(Unreachable), database(self._settings.lease_url) as conn:
                    while stop.received is None:
                        if not self._look_after_replicas():
                            return EXIT_CONFIG
                        self._look_at_leaders(conn)
                        stop.wake.wait(LOOK_SECONDS)
                stop.wake.wait(LOOK_SECONDS)
            return 0
        finally:
            say("Stopping: each worker ends, then its lease is released.")
            for replica in self._replicas:
                replica.ask_to_stop()
            for replica in self._replicas:
                replica.join(self._settings.drain_timeout_seconds + 2 * self._settings.ttl_seconds)
            say("All replicas have ended.")

    def _look_after_replicas(self) -> bool:
        for replica in self._replicas:
            if replica.died():
                self._died_at[str(replica.process.pid)] = time.monotonic()
                code = replica.process.returncode
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                say(f"{replica.name} {how}.")
                if code == EXIT_CONFIG:
                    return False
                say(f"A process manager would start it again; so do we, in {RESTART_SECONDS:g} s.")
            elif replica.died_at is not None and time.monotonic() > replica.died_at + RESTART_SECONDS:
                replica.start()
        return True

    def _look_at_leaders(self, conn: Any) -> None:
        leaders = {status.role: status.holder or "" for status in read_status(conn) if status.state is State.LEADING}
        settled, self._seen = leaders == self._seen, leaders  # one moment's changes are told together
        if not settled:
            return
        for leader in sorted(set(leaders.values())):
            new = [role for role, holder in leaders.items() if holder == leader and self._told.get(role) != leader]
            if new:
                self._tell(leader, new)
        self._told.update(leaders)

    def _tell(self, leader: str, roles: list[str]) -> None:
        pid = _pid(leader)
        name = next((replica.name for replica in self._replicas if str(replica.process.pid) == pid), leader)
        gone = [at for role in roles if (at := self._died_at.get(_pid(self._told.get(role, "")))) is not None]
        after = f" {time.monotonic() - max(gone):.1f} s after the former leader was gone" if gone else ""
        say()
        say(f"{name} leads {listed(roles)}{after}.")
        say(f"Kill it, and watch another take over:  kill -9 {pid}")
        say()


def _pid(instance: str) -> str:
    return instance.partition("-")[0]


def listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def colourful() -> bool:
    return not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty())


def say(text: str = "", who: str = "dev", colour: str = "1") -> None:
    """One line with who says it. When nobody listens any more, end as on SIGTERM."""
    label = f"\x1b[{colour}m{who:>9} |\x1b[0m" if colourful() else f"{who:>9} |"
    with _one_line_at_a_time:
        try:
            print(f"{label} {text}".rstrip(), flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            os.kill(os.getpid(), signal.SIGTERM)
