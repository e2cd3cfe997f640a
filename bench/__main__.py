"""The command: installs the contestants, measures, and writes the report into docs/."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import TEMPLATE, failover, generation, poller, poolers, process, report, standing_by
from .contestants import contestants, versions

PARTS = ("failover", "poolers", "standing_by", "process", "poller", "generation")


def tell(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench", description=sys.modules["bench"].__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (all)")
    parser.add_argument("--among", nargs="+", default=[], help="words in the names of those to measure (all)")
    parser.add_argument("--faults", nargs="+", choices=list(failover.FAULTS), default=list(failover.FAULTS))
    parser.add_argument("--trials", type=int, default=5, help="trials of each (5)")
    parser.add_argument("--at-once", type=int, default=3, help="fail-over trials at once: they mostly wait (3)")
    parser.add_argument("--standbys", nargs="+", type=int, default=[1, 10, 100, 300], help="(1 10 100 300)")
    parser.add_argument("--rows", nargs="+", type=int, default=[0, 100_000, 1_000_000], help="(0 100000 1000000)")
    parser.add_argument("--seconds", type=float, default=10, help="of work to look at in each trial of a queue (10)")
    parser.add_argument("--out", type=Path, default=TEMPLATE / "docs", help="where to write (docs)")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        if "generation" in options.only:
            results["generation"] = generation.measure(directory, options.trials)
            results["first_minute"] = generation.first_minute(directory, options.trials)
            tell(f"{results['generation']} {results['first_minute']}")
        if "poller" in options.only:
            results["poller"] = poller.measure(
                directory / "queues", options.rows, options.trials, options.seconds, options.among, tell
            )
        everybody = contestants(directory)
        chosen = [each for each in everybody if not options.among or any(word in each.name for word in options.among)]
        default = everybody[0]
        if "process" in options.only:  # while nothing else runs
            results["process"] = process.measure(default, options.trials)
            tell(str(results["process"]))
        if "standing_by" in options.only:
            results["standing_by"] = standing_by.measure(default, options.standbys)
            tell(str(results["standing_by"]))
        if "poolers" in options.only:
            results["poolers"] = poolers.measure(chosen)
            tell(str(results["poolers"]))
        if "failover" in options.only:
            results["failover"] = failover.measure(chosen, options.trials, options.faults, options.at_once, tell)
        options.out.mkdir(parents=True, exist_ok=True)
        report.write(results, options.out, versions())
    tell(f"written: {options.out / 'bench.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
