"""Reads what the recording workers wrote, and answers: did two of a role ever work at once, and who worked when?"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Term:
    """All the work of one process under one epoch, between its first and its last unit."""

    role: str
    pid: int
    epoch: int
    first: float  # seconds on CLOCK_MONOTONIC, one clock for all processes of the machine
    last: float
    units: int


@dataclass(frozen=True)
class Report:
    """What the record of one trial says."""

    terms: dict[str, list[Term]]

    def overlap(self, role: str) -> float:
        """The longest time for which two processes worked in a role."""
        terms = self.terms.get(role, [])
        return max(
            (
                min(earlier.last, later.last) - later.first
                for index, earlier in enumerate(terms)
                for later in terms[index + 1 :]
                if later.first <= earlier.last
            ),
            default=0.0,
        )

    def epochs_rise(self, role: str) -> bool:
        """Whether each term has a higher epoch than the one that began before it."""
        epochs = [term.epoch for term in self.terms.get(role, [])]
        return all(earlier < later for earlier, later in pairwise(epochs))

    def gap(self, role: str, fault_at: float) -> float:
        """Seconds without work, from the last unit of whoever worked at the fault to the first of the next term."""
        terms = self.terms[role]
        before = [term for term in terms if term.first <= fault_at]
        after = [term for term in terms if term.first > fault_at]
        assert before, f"nobody worked as {role} before the fault"
        assert after, f"nobody worked as {role} after the fault"
        return min(term.first for term in after) - before[-1].last

    def assert_safe(self) -> None:
        """No two at once, and rising epochs, in every role."""
        for role in self.terms:
            assert self.overlap(role) == 0, f"two {role}s at once for {self.overlap(role):.3f} s: {self.terms[role]}"
            assert self.epochs_rise(role), f"{role}: epochs do not rise: {self.terms[role]}"


def units(path: Path) -> list[tuple[float, float]]:
    """Start and end of each unit of work in one file."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(float(line[0]), float(line[1])) for line in lines if len(line) == 3]  # a killed one may end half-way


def read(directory: Path) -> Report:
    """Read the records of all processes."""
    terms: dict[str, list[Term]] = defaultdict(list)
    for path in directory.glob("*.record"):
        role, pid, epoch, _ = path.name.split(".", 3)
        if whole := units(path):
            terms[role].append(Term(role, int(pid), int(epoch), whole[0][0], whole[-1][1], len(whole)))
    return Report({role: sorted(found, key=lambda term: term.first) for role, found in terms.items()})
