"""What becomes of the leases of this replica: told in the log, and kept for whoever asks.

The elector's thread alone writes. Any thread reads and no lock is taken, so no reader can hold up the lease; every set
of labels is complete from the start, so none grows under a reader.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from ..keys import ENV_PREFIX, SERVICE, LeaseKey
from .decision import Holder
from .session import Refused
from .stability import Stability, Verdict
from .term import EXPIRED, SESSION_ENDED, STEPPED_DOWN, STOPPING, WORKER_ENDED, clock

log = structlog.get_logger(__name__)

ACQUIRED = "acquired"
REASONS = (ACQUIRED, STEPPED_DOWN, STOPPING, WORKER_ENDED, SESSION_ENDED, EXPIRED)

HEARTBEAT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds; 0.7 ms was measured
REMEMBERED = 50  # takeovers

_HINT = f"set {ENV_PREFIX}LEASE_DATABASE_URL to the server itself, or to a pooler in session mode"


@dataclass(frozen=True)
class RoleFacts:
    """How one role stands in this replica at one moment."""

    role: str
    phase: str
    leads: bool  # its worker runs and the lease is trusted
    epoch: int  # of this replica's last term, 0 before the first
    progress_age_seconds: float | None  # since the running worker last waited or checked
    overdue_seconds: float  # for how long its worker has outlived the kill deadline


@dataclass(frozen=True)
class Takeover:
    """A new term, of this replica or as it saw another one begin; `at` is a wall-clock time."""

    at: float
    role: str
    epoch: int
    holder: str


class Journal:
    """Told by the elector what happens."""

    def __init__(self, instance: str, roles: Iterable[LeaseKey]) -> None:
        names = [key.role for key in roles]
        self.connection = "not tried yet"  # as last told: "open", "refused", "unreachable" or "lost"
        self.turned_at = clock()  # when the elector's loop last went round
        self.heartbeat_at: float | None = None  # start of the last good heartbeat
        self.heartbeats = [0] * (len(HEARTBEAT_BOUNDS) + 1)  # by duration, the last one is for those above all bounds
        self.heartbeat_seconds = 0.0  # of all together
        self.transitions = Counter({(name, reason): 0 for name in names for reason in REASONS})
        self.refusals = Counter({Stability.MULTIPLEXED.value: 0})
        self.takeover_wait_seconds = dict.fromkeys(names, 0.0)  # of the last time that we won the lock
        self.collisions: dict[str, str | None] = dict.fromkeys(names)  # the foreign program that holds the lock
        self.takeovers: deque[Takeover] = deque(maxlen=REMEMBERED)
        self._instance = instance
        self._holders: dict[LeaseKey, tuple[int, str]] = {}
        self._epochs: dict[LeaseKey, int] = {}

    # -- the session

    def opened(self, verdict: Verdict) -> None:
        self._tell("open", "info", "session.opened", stability=verdict.stability.value)
        if verdict.stability is not Stability.DIRECT:
            log.warning("session.pooled", reason=verdict.reason, hint=_HINT)
        if not verdict.temp_allowed:
            log.warning("session.no_temp", reason="TEMP is revoked: the probe did without its temporary table")

    def refused(self, error: Refused) -> None:
        """Told each time: nothing runs until somebody changes a setting."""
        self.refusals[error.verdict] += 1
        self.connection = "refused"
        log.error("session.refused", verdict=error.verdict, reason=str(error), hint=_HINT)

    def broken(self, state: str, error: Exception) -> None:
        """No session could be had ("unreachable"), or ours has ended ("lost")."""
        self._tell(state, "warning", f"session.{state}", reason=" ".join(str(error).split()))

    def _tell(self, state: str, level: str, event: str, **fields: object) -> None:
        """One line per change of state."""
        if state != self.connection:
            getattr(log, level)(event, **fields)
        self.connection = state

    def cut(self) -> None:
        """Without a session nobody is seen."""
        self._holders.clear()
        self.collisions.update(dict.fromkeys(self.collisions))

    # -- each heartbeat

    def beat(self, started: float, ended: float) -> None:
        self.heartbeats[bisect_left(HEARTBEAT_BOUNDS, ended - started)] += 1
        self.heartbeat_seconds += ended - started
        self.heartbeat_at = started

    def saw(self, key: LeaseKey, holder: Holder | None) -> None:
        """Who else holds the lock of a role, as the last heartbeat found it."""
        foreign = holder is not None and holder.name is not None and not holder.name.startswith(f"{SERVICE} ")
        self.collisions[key.role] = (holder.name or "a program without a name") if holder and foreign else None
        if holder is None or holder.name is None:
            return
        name = holder.name.removeprefix(f"{SERVICE} ")
        if not foreign and holder.epoch != self._epochs.setdefault(key, holder.epoch):
            self._begun(key, holder.epoch, name)
        if self._holders.get(key) == (holder.pid, holder.name):
            return
        self._holders[key] = (holder.pid, holder.name)
        if not foreign:
            log.info("lease.standby", role=key.role, holder=name, holder_pid=holder.pid)
        else:
            log.error(
                "lease.collision",
                role=key.role,
                key=int(key),
                holder=holder.name,
                holder_pid=holder.pid,
                hint="another program uses this lock in this database; give one of the two another lease key base",
            )

    # -- a term

    def waits(self, key: LeaseKey, seconds: float) -> None:
        """The lock is ours; the term begins so much later."""
        self.takeover_wait_seconds[key.role] = max(0.0, seconds)
        if seconds > 0:
            log.info("lease.takeover_wait", role=key.role, wait_seconds=round(seconds, 3))

    def acquired(self, key: LeaseKey, epoch: int) -> None:
        self.transitions[key.role, ACQUIRED] += 1
        self._begun(key, epoch, self._instance)
        log.info("lease.acquired", role=key.role, epoch=epoch)

    def lost(self, key: LeaseKey, epoch: int, reason: str) -> None:
        self.transitions[key.role, reason] += 1
        log.warning("lease.lost", role=key.role, epoch=epoch, reason=reason)

    def released(self, key: LeaseKey, epoch: int, reason: str | None) -> None:
        """The lock was given back; `reason` is why the term has ended, None for one that was told as lost."""
        if reason is not None:
            self.transitions[key.role, reason] += 1
        log.info("lease.released", role=key.role, epoch=epoch)

    def _begun(self, key: LeaseKey, epoch: int, holder: str) -> None:
        self._epochs[key] = epoch
        self.takeovers.append(Takeover(time.time(), key.role, epoch, holder))
