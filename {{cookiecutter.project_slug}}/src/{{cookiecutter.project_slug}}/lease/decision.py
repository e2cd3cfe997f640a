"""What to do next for one role: pure logic, fed with clock readings and facts.

No thread, no socket, no clock of its own: the elector tells a `Candidacy` what it learned and asks for the next
`Step`. All times are seconds on one clock that never goes back.

    STANDBY ──won the lock──▶ HOLDING ──waited, epoch committed──▶ LEADING ──asked, expired, worker ended──▶ ENDING
       ▲                        │ │                                   │                                      │ │
       │◀──── released, cut ────┘ │                                   └───────────── cut ──▶ LOST ◀── cut ───┘ │
       │                          └─ (asked to stop) released                                  │               │
       └◀────────────────────────────────────── the worker has ended ──────────────────────────┴── released ──┘

`cut` means that the session has ended or that its state is unknown.
"""

import enum
from dataclasses import dataclass

from ..config import Timing

BACKOFF_FIRST = 1.0  # seconds before a role whose worker failed competes again; doubled with each failure in a row
BACKOFF_LAST = 60.0


class Doubt(Exception):
    """A fact does not fit what this session must be: close it. Closing always releases."""


class Phase(enum.Enum):
    """Where one role stands in this replica."""

    STANDBY = "standby"  # the lock is not ours
    HOLDING = "holding"  # the lock is ours, the term has not begun
    LEADING = "leading"  # the worker runs and the lease is trusted
    ENDING = "ending"  # the worker was told to stop, or has ended; the lock is ours
    LOST = "lost"  # the worker was told to stop and still runs; the lock may be another's


class Step(enum.Enum):
    """What the elector should do now."""

    NOTHING = "nothing"
    READ = "read"  # read the lease row
    BEGIN = "begin"  # commit the next epoch, then start the worker
    RELEASE = "release"  # mark the term's clean end, if there was one, and unlock


@dataclass(frozen=True)
class Holder:
    """Another session that holds the lock, as a heartbeat saw it."""

    pid: int
    name: str | None  # its application_name
    epoch: int  # of the lease row, in the same snapshot
    heard: float | None  # when it last spoke, by the server's wall clock: a mark that changes; None: not visible


@dataclass(frozen=True)
class Seen:
    """What one heartbeat found for one key."""

    held: bool = False  # by our session, before this heartbeat tried
    won: bool = False  # by this heartbeat
    holder: Holder | None = None


@dataclass(frozen=True)
class Row:
    """The lease row, read while the lock is ours, so nobody else changes it."""

    epoch: int
    holder: str | None
    pid: int | None
    trust: float | None  # the last holder's promise: not renewed after so many seconds of silence
    horizon: float | None  # the last holder's promise: its worker is gone after so many
    fenced: bool  # whether all of the last holder's writes were fenced
    timeline: int | None
    released: bool


@dataclass(frozen=True)
class _Sighting:
    holder: Holder
    first: float  # end of the first heartbeat that found it so: never earlier than its last statement
    last: float  # start of the last one


class Candidacy:
    """One role in one replica."""

    def __init__(self, instance: str, timing: Timing, *, fenced: bool) -> None:
        self.phase = Phase.STANDBY
        self.epoch = 0
        self.start_at: float | None = None  # HOLDING: when the term may begin, once the row has been read
        self.renewed_at = 0.0  # start of the last good heartbeat that counts for this term
        self.retry_at = 0.0
        self._instance = instance
        self._timing = timing
        self._fenced = fenced
        self._timeline: int | None = None
        self.worker_runs = False
        self._expired = False
        self._asked = False  # this term was asked to end
        self._closing = False  # this replica never leads again
        self._failures = 0
        self._began_at = 0.0
        self._won_at = 0.0
        self._sighting: _Sighting | None = None

    # -- what the elector asks

    @property
    def trust_until(self) -> float:
        """The worker is told to stop at this time, unless a heartbeat renews the lease first."""
        return self.renewed_at + self._timing.trust

    @property
    def kill_at(self) -> float | None:
        """The process must be gone at this time if the worker still runs."""
        return self.renewed_at + self._timing.kill if self.worker_runs else None

    @property
    def idle(self) -> bool:
        """Neither lock nor worker."""
        return self.phase is Phase.STANDBY

    def tries(self, now: float) -> bool:
        """Whether the next heartbeat should try for the lock."""
        return self.phase is Phase.STANDBY and not self._closing and now >= self.retry_at

    def next(self, now: float) -> Step:
        """The step that is due; the outcome is told by `read`, `begun` or `released`."""
        if self.phase is Phase.LEADING and now >= self.trust_until:
            self.expire()
        if self.phase is Phase.ENDING and not self.worker_runs:
            return Step.RELEASE
        if self.phase is Phase.HOLDING:
            if self._closing:
                return Step.RELEASE
            if self.start_at is None:
                return Step.READ
            # a process that slept since its last heartbeat must prove its session again before it begins
            if self.start_at <= now < self.trust_until:
                return Step.BEGIN
        return Step.NOTHING

    # -- what the elector tells

    def beat(self, started: float, ended: float, timeline: int | None, seen: Seen) -> None:
        """A heartbeat answered: its start and end, the server's timeline and what it found.

        Raises:
            Doubt: the session can't be what it must be.
        """
        if self.phase in (Phase.STANDBY, Phase.LOST):
            if seen.held:
                raise Doubt("this session holds a lock that it never took, so others share it")
            if seen.won:
                self.phase = Phase.HOLDING
                self.renewed_at = started
                self._timeline = timeline
                self.start_at = None
                self._won_at = ended
            elif seen.holder is not None and seen.holder.heard is not None:
                before = self._sighting
                first = before.first if before is not None and before.holder == seen.holder else ended
                self._sighting = _Sighting(seen.holder, first, last=started)
            return
        if not seen.held:
            raise Doubt("the lock has vanished from pg_locks")
        if timeline != self._timeline:
            raise Doubt(f"the server's timeline changed from {self._timeline} to {timeline}: it was failed over")
        if self.phase is Phase.HOLDING:
            self.renewed_at = started
        elif ended >= self.trust_until:
            self.expire()
        elif not self._expired:
            self.renewed_at = started

    def read(self, row: Row) -> None:
        """The lease row of a lock just won: decides when the term may begin."""
        assert self.phase is Phase.HOLDING
        same_timeline = row.timeline is not None and row.timeline == self._timeline
        # A row from another timeline proves nothing: the fail-over may have lost later terms. On ours, our own
        # former term needs no wait, since a role competes only once its worker has ended.
        # Fenced writes need no wait, if the predecessor, perhaps of another release, made none but fenced ones.
        both_fenced = self._fenced and row.fenced
        if same_timeline and (row.released or row.holder == self._instance or both_fenced):
            self.start_at = self._won_at
            return
        horizon = self._timing.horizon if row.horizon is None else row.horizon
        if not same_timeline:
            horizon = max(horizon, self._timing.horizon)
        self.start_at = self._heard_at(row, same_timeline) + horizon

    def _heard_at(self, row: Row, same_timeline: bool) -> float:
        """The latest time at which the predecessor can have renewed its lease, on our clock.

        Between our last look and the end of its session it may have renewed once more, up to the moment in which
        we won the lock. Not so if at our last look it had been silent for longer than it trusts its lease: no
        heartbeat revives an expired term. The silence is measured between our own looks, since the server's wall
        clock may jump.
        """
        seen = self._sighting
        if (
            same_timeline
            and seen is not None
            and (seen.holder.pid, seen.holder.epoch) == (row.pid, row.epoch)
            and row.trust is not None
            and seen.last - seen.first >= row.trust
        ):
            return seen.first
        return self._won_at

    def begun(self, epoch: int | None, now: float) -> None:
        """The next epoch was committed, or (None) the row is locked by a transaction in flight: try again later."""
        assert self.phase is Phase.HOLDING
        if epoch is None:
            self.start_at = now + self._timing.interval
            return
        self.phase = Phase.LEADING
        self.epoch = epoch
        self.worker_runs = True
        self._expired = self._asked = False
        self._began_at = now

    def ask(self) -> None:
        """Ask the term to end in order; the lease is kept until the worker has ended."""
        self._asked = True
        if self.phase is Phase.LEADING:
            self.phase = Phase.ENDING

    def close(self) -> None:
        """Ask the term to end, and never compete again."""
        self._closing = True
        self.ask()

    def expire(self) -> None:
        """The trust has run out. This term ends, and no later heartbeat puts off its kill."""
        self._expired = True
        if self.phase is Phase.LEADING:
            self.phase = Phase.ENDING

    def ended(self, now: float, jitter: float) -> None:
        """The worker has ended. `jitter` (0.5 to 1.5) spreads the back-off of one that was not asked to."""
        self.worker_runs = False
        if self._asked:
            # stepping down: leave the others time to take it
            self.retry_at = now + 2 * self._timing.interval
        elif self.phase is Phase.LEADING:
            if now - self._began_at > BACKOFF_LAST:
                self._failures = 0
            self.retry_at = now + jitter * min(BACKOFF_LAST, BACKOFF_FIRST * 2**self._failures)
            self._failures = min(self._failures + 1, 16)
        self.phase = Phase.STANDBY if self.phase is Phase.LOST else Phase.ENDING

    def released(self) -> None:
        """The lock has been given back."""
        assert not self.worker_runs
        self.phase = Phase.STANDBY

    def cut(self) -> None:
        """The session has ended, or nobody knows: the lock is not ours."""
        self._sighting = None
        self._expired = True
        self.phase = Phase.LOST if self.worker_runs else Phase.STANDBY
