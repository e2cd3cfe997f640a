"""Who worked when, for contestants whose processes may stop and go on without a new term."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from laboratory.record import units

PAUSE = 0.25  # seconds without a unit that end a span; a unit is due each ten milliseconds, on a busy machine later


@dataclass(frozen=True)
class Span:
    """Uninterrupted work of one process; seconds on CLOCK_MONOTONIC."""

    pid: int
    first: float
    last: float


def read(directory: Path) -> dict[str, list[Span]]:
    """The spans of each role, from the same files that the tests' checker reads."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for path in directory.glob("*.record"):
        role, pid, *_ = path.name.split(".")
        times = [end for _, end in units(path)]
        breaks = [index for index, (a, b) in enumerate(pairwise(times), 1) if b - a > PAUSE]
        for start, stop in pairwise([0, *breaks, len(times)]):
            if start < stop:
                spans[role].append(Span(int(pid), times[start], times[stop - 1]))
    return {role: sorted(found, key=lambda span: span.first) for role, found in spans.items()}


def seconds(spans: list[Span], since: float, until: float) -> tuple[float, float]:
    """Seconds between two moments in which nobody worked, and in which two or more processes did."""
    edges = {since, until} | {at for span in spans for at in (span.first, span.last) if since < at < until}
    nobody = several = 0.0
    for start, stop in pairwise(sorted(edges)):
        pids = {span.pid for span in spans if span.first <= start and stop <= span.last}
        nobody += (stop - start) * (not pids)
        several += (stop - start) * (len(pids) > 1)
    return nobody, several


def working(spans: list[Span], at: float) -> set[int]:
    """The processes that worked within the last two tenths of a second."""
    return {span.pid for span in spans if span.first <= at <= span.last + 0.2}
