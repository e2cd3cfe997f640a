"""One term of leadership: what the elector and the worker share."""

import os
import threading
import time
from collections.abc import Callable

from ..keys import LeaseKey

# Why a term ends, in the log and in the metrics.
STEPPED_DOWN = "asked to step down"
STOPPING = "the service is stopping"
WORKER_ENDED = "the worker ended by itself"
SESSION_ENDED = "the lease's session has ended"
EXPIRED = "no heartbeat was answered in time"


class LeaseLost(Exception):
    """The worker must end: its lease is no longer trusted, or it was asked to stop."""


if hasattr(time, "CLOCK_BOOTTIME"):

    def clock() -> float:
        """Seconds on a clock that never goes back and counts the time in suspend, as the server's clock does."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    clock = time.monotonic


class Term:
    """One term: renewed by the elector's thread, asked by the worker's.

    A term whose deadline has passed is lost for good, whoever looks first. In a forked child it never holds.
    """

    def __init__(self, key: LeaseKey, epoch: int, deadline: float) -> None:
        self.key = key
        self.epoch = epoch
        self.progress_at = clock()
        self.stop_asked_at: float | None = None
        self.ended = threading.Event()  # set once the worker's code has returned
        self._pid = os.getpid()
        self._deadline = deadline
        self._reason: str | None = None  # why the worker should end
        self._lost = False
        self._changed = threading.Condition()
        self._listener: Callable[[], object] | None = None

    # -- the elector's side

    def renew(self, deadline: float) -> bool:
        """Move the deadline; False if the term was lost before."""
        with self._changed:
            if not self.held:
                return False
            self._deadline = deadline
            return True

    def stop(self, reason: str) -> None:
        """Ask the worker to end while the lease is kept for it."""
        self.stop_asked_at = self.stop_asked_at or clock()
        self._end(reason, lost=False)

    def lose(self, reason: str) -> None:
        """Tell the worker that it leads no longer."""
        self._end(reason, lost=True)

    def _end(self, reason: str, *, lost: bool) -> None:
        with self._changed:
            self._lost = self._lost or lost
            self._reason = self._reason or reason
            self._changed.notify_all()
            listener = self._listener
        if listener is not None:
            listener()

    # -- the worker's side

    @property
    def held(self) -> bool:
        """Whether the lease is ours and trusted."""
        if not self._lost and (clock() >= self._deadline or os.getpid() != self._pid):
            self._lost = True
            self._reason = self._reason or EXPIRED
        return not self._lost

    @property
    def reason(self) -> str | None:
        """Why the worker should end; None while it should go on."""
        return None if self.held and self._reason is None else self._reason

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, as it stands now."""
        return max(0.0, self._deadline - clock())

    def wait(self, seconds: float) -> bool:
        """Sleep; False as soon as the worker should end, True when the time is over."""
        until = clock() + seconds
        with self._changed:
            while True:
                self.progress_at = now = clock()
                if self.reason is not None:
                    return False
                if now >= until:
                    return True
                self._changed.wait(min(until - now, self.remaining))

    def check(self) -> None:
        """Return if the worker should go on.

        Raises:
            LeaseLost: it should end.
        """
        self.progress_at = clock()
        if (reason := self.reason) is not None:
            raise LeaseLost(reason)

    def listen(self, listener: Callable[[], object] | None) -> None:
        """Have `listener` called, in the elector's thread, when the worker should end."""
        with self._changed:
            self._listener = listener
        if listener is not None and self.reason is not None:
            listener()
