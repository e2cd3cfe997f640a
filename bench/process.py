"""One replica as a process: from its start to leading, what importing costs, its memory, and its CPU when idle."""

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from laboratory.environment import clean_environment
from laboratory.servers import wait_until

from . import spans
from .contestants import Contestant, end
from .failover import Stage, stage

IDLE = 60.0  # seconds over which the CPU of a stand-by is counted
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """What one replica of this service costs."""

    start_to_leading: list[float]  # seconds until the first unit of work, one value a trial
    import_seconds: list[float]
    resident_mib: float  # of a stand-by
    proportional_mib: float  # its share of that (PSS)
    cpu_percent: float  # of one core, of a stand-by over `IDLE` seconds


def memory(pid: int, kind: str) -> float:
    """Rss or Pss of a process in MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {kind} of {pid}")


def cpu(pid: int) -> float:
    """Seconds of CPU that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def cpu_of_children(pid: int) -> float:
    """Seconds of CPU of a process's children, living and dead; not of the process itself."""
    dead = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[13:15]
    living = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    seconds = sum(map(int, dead)) / TICKS
    for child in living:
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            seconds += cpu(int(child))
    return seconds


def import_seconds(python: Path) -> float:
    """What importing the service takes on top of starting an interpreter."""

    def took(code: str) -> float:
        started = time.monotonic()
        subprocess.run([python, "-c", code], env=clean_environment(), check=True)
        return time.monotonic() - started

    return took("import acme_billing.supervisor") - took("pass")


def start_to_leading(here: Stage, number: int) -> float:
    at = time.monotonic()
    replica = here.contestant.start(here.url, here.directory, number)

    def works() -> bool:
        return any(span.pid == replica.pid for found in spans.read(here.directory).values() for span in found)

    try:
        wait_until(works, 20, lambda: f"it leads: {replica.log}")
        mine = [span for found in spans.read(here.directory).values() for span in found if span.pid == replica.pid]
        replica.process.terminate()  # in order, so that the next need not wait
        replica.process.wait(20)
        return min(span.first for span in mine) - at
    finally:
        end([replica])


def measure(service: Contestant, trials: int, idle: float = IDLE) -> Process:
    python = Path(service.command[0]).parent / "python"
    import_seconds(python)  # the first one writes the byte code
    imports = [import_seconds(python) for _ in range(trials)]
    with stage(service) as here:
        leader = here.leader()
        standby = next(each for each in here.replicas if each is not leader)
        wait_until(lambda: "lease.standby" in standby.log, 20, lambda: standby.log)
        before = cpu(standby.pid)
        time.sleep(idle)
        percent = (cpu(standby.pid) - before) / idle * 100
        rss, pss = memory(standby.pid, "Rss"), memory(standby.pid, "Pss")
    with stage(service, replicas=0) as here:
        starts = [start_to_leading(here, number) for number in range(trials)]
    return Process(starts, imports, rss, pss, percent)
