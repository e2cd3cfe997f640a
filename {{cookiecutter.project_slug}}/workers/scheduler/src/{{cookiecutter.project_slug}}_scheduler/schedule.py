"""When a job is planned: pure functions of time, no clock of their own, everything in and out in UTC."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from cronsim import CronSim, CronSimError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNITS = {"s": timedelta(seconds=1), "m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}

# How far to look back for the latest planned time: as little as will do, since there is one step for each time between.
LOOKS_BACK = [
    timedelta(minutes=1),
    timedelta(hours=1),
    timedelta(days=1),
    timedelta(days=40),
    timedelta(days=400),
    timedelta(days=50 * 365),
]


class Schedule(Protocol):
    def latest(self, now: datetime) -> datetime:
        """The last planned time that is not after `now`."""

    def next(self, now: datetime) -> datetime:
        """The first planned time after `now`."""


@dataclass(frozen=True)
class Every:
    """Each multiple of an interval, counted from 1970 in UTC, so that every replica and release agrees on them."""

    interval: timedelta

    def __str__(self) -> str:
        unit, length = next((unit, length) for unit, length in reversed(UNITS.items()) if not self.interval % length)
        return f"every {self.interval // length}{unit}"

    def latest(self, now: datetime) -> datetime:
        return EPOCH + (now - EPOCH) // self.interval * self.interval

    def next(self, now: datetime) -> datetime:
        return self.latest(now) + self.interval


@dataclass(frozen=True)
class Cron:
    """A cron expression in the wall-clock time of a zone.

    As in Debian's cron, a job at a fixed time that the spring gap swallows runs when the gap ends, and one in the fold
    of autumn runs once, the first time; jobs with a `*` for the minute or the hour go on by elapsed time.
    """

    expression: str
    zone: ZoneInfo

    def __str__(self) -> str:
        return f"{self.expression} {self.zone.key}"

    def latest(self, now: datetime) -> datetime:
        for look_back in LOOKS_BACK:
            times = list(self._between(now - look_back, now))
            if times:
                return times[-1]
        return EPOCH

    def next(self, now: datetime) -> datetime:
        # in the fold the walk may begin an hour back, since a fixed time counts as its first occurrence
        return next(time for time in self._after(now) if time > now)

    def _between(self, start: datetime, end: datetime) -> Iterator[datetime]:
        for time in self._after(start):
            if time > end:
                return
            yield time

    def _after(self, start: datetime) -> Iterator[datetime]:
        for time in CronSim(self.expression, start.astimezone(self.zone)):
            yield time.astimezone(UTC)


def parse(*, cron: str | None, every: str | None, tz: str) -> Schedule:
    """The schedule that a job's arguments describe.

    Raises:
        ValueError: they describe none, or one that never fires.
    """
    if cron is not None and every is None:
        return _parse_cron(cron, tz)
    if every is not None and cron is None:
        return _parse_every(every)
    raise ValueError("needs either cron= or every=")


def _parse_every(every: str) -> Every:
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", every)
    if match is None:
        raise ValueError(f'every={every!r} is no interval; write a number and one of s, m, h, d, as in "15m"')
    return Every(int(match[1]) * UNITS[match[2]])


def _parse_cron(cron: str, tz: str) -> Cron:
    try:
        zone = ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        meant = get_close_matches(tz, available_timezones(), n=1)
        hint = f"; did you mean {meant[0]!r}?" if meant else ""
        raise ValueError(f"tz={tz!r} is no time zone{hint}") from None
    try:
        CronSim(cron, EPOCH)
    except (CronSimError, AssertionError) as error:
        raise ValueError(f"cron={cron!r} is no cron expression: {error}") from None
    schedule = Cron(cron, zone)
    try:
        schedule.next(EPOCH)
    except StopIteration:
        raise ValueError(f"cron={cron!r} never fires") from None
    return schedule
