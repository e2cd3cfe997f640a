"""What every peer does while it believes to lead: one line each ten milliseconds, in a file for each term.

Imported by the peers' own interpreters, so it knows nothing but the standard library.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

URL = os.environ.get("PEER_URL", "")
UNIT_SECONDS = 0.01

_terms = itertools.count(1)


def begin() -> TextIO:
    """A new term; peers have no epochs, so the file carries a number of its own."""
    name = f"leader.{os.getpid()}.{next(_terms)}.record"
    return Path(os.environ["RECORD_DIRECTORY"], name).open("a", buffering=1)


def unit(file: TextIO) -> None:
    now = time.monotonic()
    file.write(f"{now:.6f} {now:.6f} .\n")


def work(leads: Callable[[], bool] = lambda: True) -> None:
    """Work as long as we believe to lead."""
    with begin() as file:
        while leads():
            time.sleep(UNIT_SECONDS)
            unit(file)


async def work_until_cancelled() -> None:
    with begin() as file:
        while True:
            await asyncio.sleep(UNIT_SECONDS)
            unit(file)
