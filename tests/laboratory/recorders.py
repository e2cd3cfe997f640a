"""The bodies that the laboratory gives to a baked project's three workers: each records what it does.

`@SLUG@` is replaced by the project's package. One line a unit of work: its start, its end, and a dot that shows the
line is whole. A unit is done right after a check, as the documentation asks of work that reaches outside, and its time
is that of the check: what a pause between the two lets through nothing can prevent. A fenced one is stamped inside its
transaction and counts once that is committed. RECORD_BEHAVIOUR makes the scheduler misbehave.
"""

HEAD = """
import asyncio
import os
import time
from pathlib import Path

from @SLUG@ import Lease, Worker


def record(lease: Lease):
    path = Path(os.environ["RECORD_DIRECTORY"]) / f"{lease.role}.{os.getpid()}.{lease.epoch}.record"
    return path.open("a", buffering=1)


def unit(file, at: float | None = None) -> None:
    at = at or time.monotonic()
    file.write(f"{at:.6f} {at:.6f} .\\n")


def checked_unit(lease: Lease, file) -> None:
    at = time.monotonic()
    lease.check()
    unit(file, at)

"""

EXTERNAL = (
    HEAD
    + '''
import ctypes
import re


def good(lease: Lease, file) -> None:
    while lease.wait(0.003):
        checked_unit(lease, file)


def ignores(lease: Lease, file) -> None:
    while True:
        time.sleep(0.003)
        unit(file)


def sleeps(lease: Lease, file) -> None:
    """A call into C that lets go of the GIL and never looks at the lease."""
    unit(file)
    ctypes.CDLL(None).sleep(600)


def holds_the_gil(lease: Lease, file) -> None:
    """As good as another, until the file `now` appears; then catastrophic backtracking, for years."""
    while lease.wait(0.003):
        checked_unit(lease, file)
        if Path(os.environ["RECORD_DIRECTORY"], "now").exists():
            re.match("(a+)+$", "a" * 64 + "b")


def forks(lease: Lease, file) -> None:
    """A child that goes on as if nothing had happened, and outlives us."""
    if (pid := os.fork()) == 0:
        good(lease, file)
        time.sleep(600)
        os._exit(0)
    Path(os.environ["RECORD_DIRECTORY"], f"child.{pid}").touch()
    good(lease, file)


def raises(lease: Lease, file) -> None:
    unit(file)
    raise RuntimeError("as always")


def returns(lease: Lease, file) -> None:
    unit(file)


def run(lease: Lease) -> None:
    with record(lease) as file:
        globals()[os.environ.get("RECORD_BEHAVIOUR", "good")](lease, file)


worker = Worker(run)
'''
)

FENCED = (
    HEAD
    + """
INSERT = "insert into public.fenced_writes (epoch, instance) values (%s, %s)"


def run(lease: Lease) -> None:
    hold = Path(os.environ["RECORD_DIRECTORY"], "hold")
    quiet = Path(os.environ["RECORD_DIRECTORY"], "quiet")
    with record(lease) as file:
        while lease.wait(0.003):
            if quiet.exists():  # who counts statements wants none of ours
                continue
            with lease.transaction() as conn:
                conn.execute(INSERT, [lease.epoch, lease.instance])
                done_at = time.monotonic()
                while hold.exists():  # a test keeps the transaction open
                    time.sleep(0.001)
            unit(file, done_at)


worker = Worker(run, effects="fenced")
"""
)

ASYNC_EXTERNAL = (
    HEAD
    + """
async def run(lease: Lease) -> None:
    with record(lease) as file:
        while True:
            await asyncio.sleep(0.003)
            checked_unit(lease, file)


worker = Worker(run)
"""
)
