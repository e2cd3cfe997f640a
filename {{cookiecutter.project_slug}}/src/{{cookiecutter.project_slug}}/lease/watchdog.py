"""The last resort: a timer in C, which needs no GIL, ends the process when a worker outlives its lease.

Measured: it fires while a regular expression holds the GIL. The exit code is 1, after the stacks of all threads.
"""

import faulthandler
import os
from collections.abc import Sequence


class Watchdog:
    """One timer for the process; each heartbeat puts it off."""

    def __init__(self) -> None:
        # standard error, opened so that no full pipe can keep the process alive
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK
        try:
            self._stderr = os.open("/dev/stderr", flags)
        except OSError:  # a socket, say
            self._stderr = os.open(os.devnull, flags)

    def arm(self, kills: Sequence[float], now: float) -> None:
        """End the process at the earliest of these times; none of them disarms."""
        if kills:
            faulthandler.dump_traceback_later(max(0.001, min(kills) - now), exit=True, file=self._stderr)
        else:
            faulthandler.cancel_dump_traceback_later()
