import re
from datetime import UTC, datetime, timedelta
from itertools import groupby
from zoneinfo import ZoneInfo

import pytest

from {{cookiecutter.project_slug}}_scheduler.schedule import Cron, Every, Schedule, parse

NOON = datetime(2026, 3, 10, 12, 7, 30, tzinfo=UTC)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def fired(schedule: Schedule, start: datetime, end: datetime, step: timedelta) -> list[str]:
    """What a scheduler that looks each `step` sees as its latest planned times; `next` has to agree."""
    seen = [schedule.latest(start)]
    now = start
    while now < end:
        upcoming = schedule.next(now)
        assert upcoming > now
        now += step
        latest = schedule.latest(now)
        assert latest <= now
        if latest != seen[-1]:
            assert latest > seen[-1]
            assert upcoming <= latest
            seen.append(latest)
    return [f"{time:%d %H:%M}" for time in seen[1:]]


@pytest.mark.parametrize(
    ("every", "latest"), [("15m", "12:00:00"), ("30s", "12:07:30"), ("6h", "12:00:00"), ("1d", "00:00:00")]
)
def test_an_interval_is_floored_in_utc(every: str, latest: str) -> None:
    schedule = parse(cron=None, every=every, tz="UTC")
    assert schedule.latest(NOON) == utc(f"2026-03-10 {latest}")
    assert schedule.latest(schedule.next(NOON) - timedelta(microseconds=1)) == schedule.latest(NOON)
    assert schedule.latest(schedule.next(NOON)) == schedule.next(NOON)


@pytest.mark.parametrize(
    ("cron", "latest", "upcoming"),
    [
        ("*/5 * * * *", "2026-03-10 12:05", "2026-03-10 12:10"),
        ("0 2 * * *", "2026-03-10 02:00", "2026-03-11 02:00"),
        ("0 0 1 * *", "2026-03-01 00:00", "2026-04-01 00:00"),
        ("0 0 1 1 *", "2026-01-01 00:00", "2027-01-01 00:00"),
        ("0 0 29 2 *", "2024-02-29 00:00", "2028-02-29 00:00"),
    ],
)
def test_cron_knows_the_latest_and_the_next_time(cron: str, latest: str, upcoming: str) -> None:
    schedule = parse(cron=cron, every=None, tz="UTC")
    assert schedule.latest(NOON) == utc(latest)
    assert schedule.next(NOON) == utc(upcoming)
    assert schedule.latest(utc(upcoming)) == utc(upcoming)


# The clocks change at 01:00 UTC in Berlin (on the 29th and the 25th), at 07:00 and 06:00 UTC in New York (8th, 1st),
# and on Lord Howe Island by half an hour, at 15:00 and 15:30 UTC (4th of April back, 3rd of October forth).
@pytest.mark.parametrize(
    ("zone", "cron", "start", "expected"),
    [
        ("Europe/Berlin", "30 2 * * *", "2026-03-28 00:00", ["28 01:30", "29 01:00", "30 00:30"]),
        ("Europe/Berlin", "30 2 * * *", "2026-10-24 00:00", ["24 00:30", "25 00:30", "26 01:30"]),
        ("America/New_York", "30 2 * * *", "2026-03-07 00:00", ["07 07:30", "08 07:00", "09 06:30"]),
        ("America/New_York", "30 1 * * *", "2026-10-31 00:00", ["31 05:30", "01 05:30", "02 06:30"]),
        ("Australia/Lord_Howe", "15 2 * * *", "2026-10-02 00:00", ["02 15:45", "03 15:30", "04 15:15"]),
        ("Australia/Lord_Howe", "45 1 * * *", "2026-04-03 00:00", ["03 14:45", "04 14:45", "05 15:15"]),
    ],
)
def test_a_fixed_time_fires_once_a_day_when_the_clocks_change(
    zone: str, cron: str, start: str, expected: list[str]
) -> None:
    schedule = Cron(cron, ZoneInfo(zone))
    assert fired(schedule, utc(start), utc(start) + timedelta(days=3), timedelta(minutes=5)) == expected


def test_an_hourly_job_goes_on_by_elapsed_time_when_the_clocks_change() -> None:
    schedule = Cron("0 * * * *", ZoneInfo("Europe/Berlin"))
    for day in ("2026-03-28 22:30", "2026-10-24 22:30"):
        times = fired(schedule, utc(day), utc(day) + timedelta(hours=6), timedelta(minutes=5))
        assert [time[3:] for time in times] == ["23:00", "00:00", "01:00", "02:00", "03:00", "04:00"]


@pytest.mark.parametrize(
    ("day", "first", "then", "count"), [("2026-10-02 15:00", "50", "20", 47), ("2026-04-03 15:00", "20", "50", 48)]
)
def test_an_hourly_job_keeps_to_the_minute_on_the_wall_where_the_clocks_change_by_half_an_hour(
    day: str, first: str, then: str, count: int
) -> None:
    schedule = Cron("20 * * * *", ZoneInfo("Australia/Lord_Howe"))
    times = fired(schedule, utc(day), utc(day) + timedelta(days=2), timedelta(minutes=5))
    assert len(times) == count
    assert [minute for minute, _ in groupby(time[-2:] for time in times)] == [first, then]


@pytest.mark.parametrize(
    ("cron", "every", "tz", "message"),
    [
        ("0 2 * *", None, "UTC", "'0 2 * *' is no cron expression: Wrong number of fields"),
        ("61 * * * *", None, "UTC", "Bad minute"),
        ("* * * * MON#1/2", None, "UTC", "is no cron expression"),
        ("0 0 30 2 *", None, "UTC", "Bad day-of-month"),
        ("0 0 */40 2 MON#5", None, "UTC", "never fires"),
        ("0 2 * * *", None, "Europe/Berln", "did you mean 'Europe/Berlin'?"),
        ("0 2 * * *", None, "../etc/passwd", "is no time zone"),
        (None, "15 minutes", "UTC", 'as in "15m"'),
        (None, "0m", "UTC", "is no interval"),
        (None, None, "UTC", "needs either cron= or every="),
        ("0 2 * * *", "1d", "UTC", "needs either cron= or every="),
    ],
)
def test_a_schedule_that_is_wrong_is_refused(cron: str | None, every: str | None, tz: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(cron=cron, every=every, tz=tz)


def test_a_schedule_says_what_it_is() -> None:
    assert [str(parse(cron=None, every=every, tz="UTC")) for every in ("90s", "60m", "24h")] == [
        "every 90s",
        "every 1h",
        "every 1d",
    ]
    assert str(parse(cron="0 2 * * *", every=None, tz="Asia/Tokyo")) == "0 2 * * * Asia/Tokyo"


def test_every_replica_agrees_on_the_multiples_of_an_interval() -> None:
    schedule = Every(timedelta(days=7))
    assert schedule.latest(NOON) == schedule.latest(NOON + timedelta(minutes=1)) == utc("2026-03-05")
