"""The command: installs the contestants, measures, and writes the report into docs/."""

import argparse
import sys
from pathlib import Path
from typing import Any

from laboratory.servers import room_for_servers

from . import TEMPLATE, failover, generation, poller, poolers, process, report, standing_by
from .contestants import contestants, versions
from .queues import QUEUE_PACKAGES

PARTS = ("failover", "poolers", "standing_by", "process", "poller", "generation")


def tell(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench", description=sys.modules["bench"].__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure; those measured before are kept (all)"
    )
    parser.add_argument("--among", nargs="+", default=[], help="words in the names of those to measure (all)")
    parser.add_argument("--faults", nargs="+", choices=list(failover.FAULTS), default=list(failover.FAULTS))
    parser.add_argument("--trials", type=int, default=5, help="trials of each (5)")
    parser.add_argument("--at-once", type=int, default=6, help="trials at once of what mostly waits (6)")
    parser.add_argument("--standbys", nargs="+", type=int, default=[1, 10, 100, 300], help="(1 10 100 300)")
    parser.add_argument("--rows", nargs="+", type=int, default=[0, 100_000, 1_000_000], help="(0 100000 1000000)")
    parser.add_argument("--seconds", type=float, default=10, help="of work to look at in each trial of a queue (10)")
    parser.add_argument("--out", type=Path, default=TEMPLATE / "docs", help="where to write (docs)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    stated = [*versions(), *(each for packages in QUEUE_PACKAGES.values() for each in packages)]
    results = report.load(options.out, stated)

    def found(part: str, what: Any) -> None:
        results[part] = what
        if part not in ("failover", "poller"):  # those tell as they go
            tell(str(what))
        report.write(results, options.out, stated)  # each time: what breaks later loses nothing

    with room_for_servers() as directory:
        if "generation" in options.only:
            found("generation", generation.measure(directory, options.trials))
            found("first_minute", generation.first_minute(directory, options.trials))
        if "poller" in options.only:
            queues = directory / "queues"
            found("poller", poller.measure(queues, options.rows, options.trials, options.seconds, options.among, tell))
        everybody = contestants(directory)
        chosen = [each for each in everybody if not options.among or any(word in each.name for word in options.among)]
        default = everybody[0]
        if "process" in options.only:  # while nothing else runs
            found("process", process.measure(default, options.trials))
        if "standing_by" in options.only:
            found("standing_by", standing_by.measure(default, options.standbys))
        if "poolers" in options.only:
            found("poolers", poolers.measure(chosen, options.at_once))
        if "failover" in options.only:
            found("failover", failover.measure(chosen, options.trials, options.faults, options.at_once, tell))
    tell(f"written: {options.out / 'bench.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
