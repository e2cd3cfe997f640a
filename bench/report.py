"""Writes what was measured: JSON for machines, Markdown tables and one picture for people."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

from .failover import FAULTS, WATCHED, Trial
from .generation import FirstMinute, Generated
from .poller import Poller, Throughput, medians
from .poolers import Pooled
from .process import IDLE, Process
from .standing_by import StandingBy

Results = Mapping[str, Any]  # the name of a part to what it found

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .back { fill: #ffffff } .quiet { fill: #59636e } .end { text-anchor: end }
  .nobody { fill: #8c959f } .two { fill: #cf222e } .grid { stroke: #d1d9e0 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .back { fill: #0d1117 } .quiet { fill: #9198a1 }
    .nobody { fill: #656c76 } .two { fill: #ff7b72 } .grid { stroke: #30363d }
  }
"""


def machine() -> str:
    """What it was measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")] or [platform.machine()]
    return f"{os.cpu_count()} cores ({models[0]}), Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median with minimum and maximum."""
    if not values:
        return "failed"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def verdict(reached: bool) -> str:
    """What a table says of a goal."""
    return "met" if reached else "**missed**"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def names(trials: Sequence[Trial]) -> list[str]:
    """This service first, then its peers."""
    return sorted({trial.contestant for trial in trials}, key=lambda name: (not name.startswith("this service"), name))


def cell(trials: Sequence[Trial], name: str, fault: str) -> str:
    mine = [trial for trial in trials if (trial.contestant, trial.fault) == (name, fault)]
    text = spread([trial.nobody for trial in mine])
    if several := [trial.several for trial in mine if trial.several > 0]:
        text += f"; **two for {statistics.median(several):.1f} s in {len(several)} of {len(mine)}**"
    return text


def failover(trials: Sequence[Trial]) -> list[str]:
    faults = [fault for fault in FAULTS if any(trial.fault == fault for trial in trials)]
    rows = [[name, *(cell(trials, name, fault) for fault in faults)] for name in names(trials)]
    each = max(sum((t.contestant, t.fault) == (trials[0].contestant, fault) for t in trials) for fault in faults)
    return [
        "## Fail-over",
        "",
        "![Seconds without a worker, and with two](bench-failover.svg)",
        "",
        f"Three replicas; seconds in which nobody worked, median (minimum to maximum) of {each} trials. After all faults but",
        f"the first two we watched for {WATCHED:g} s, so {WATCHED:g} means: nobody took over. **Two** is for how long two",
        "replicas worked at once, in those trials in which they did.",
        "",
        *table(["", *faults], rows),
        *goals(trials),
    ]


def median(trials: Sequence[Trial], name: str, fault: str) -> float:
    return statistics.median(trial.nobody for trial in trials if (trial.contestant, trial.fault) == (name, fault))


def goals(trials: Sequence[Trial]) -> list[str]:
    """What we wanted of this service, and whether it came out so."""
    ours = [name for name in names(trials) if name.startswith("this service")]
    if not ours:
        return []
    faults = [
        fault for fault in FAULTS if all(any((t.contestant, t.fault) == (n, fault) for t in trials) for n in ours)
    ]
    rows = []

    def goal(text: str, value: str, *, reached: bool) -> None:
        rows.append([text, value, verdict(reached)])

    two = [trial for trial in trials if trial.contestant in ours and trial.several > 0]
    count = sum(trial.contestant in ours for trial in trials)
    goal("never two leaders", f"in {len(two)} of {count} trials", reached=not two)
    for name in ours:
        if "SIGTERM" in faults:
            found = median(trials, name, "SIGTERM")
            goal(f"{name}: SIGTERM hands over in 0.02 s", f"{found:.3f} s", reached=found < 0.02)
        if "SIGKILL" in faults and name.endswith("fenced"):
            found, interval = median(trials, name, "SIGKILL"), 0.25 if "fast" in name else 1.0
            goal(f"{name}: SIGKILL within an interval, {interval:g} s", f"{found:.2f} s", reached=found < interval)
    peers = [name for name in names(trials) if name not in ours]
    safe = [name for name in peers if not any(t.contestant == name and t.several > 0 for t in trials)]
    for fault in faults:
        behind = [
            f"{peer} ({median(trials, peer, fault):.2f} s)"
            for peer in safe
            if any((t.contestant, t.fault) == (peer, fault) for t in trials)
            and median(trials, peer, fault) < min(median(trials, name, fault) for name in ours)
        ]
        text = f"{fault}: ahead of each peer that never had two leaders"
        goal(text, f"behind {', '.join(behind)}" if behind else f"{len(safe)} of them", reached=not behind)
    return ["", *table(["goal", "measured", ""], rows)]


def poolers(found: Sequence[Pooled]) -> list[str]:
    rows = []
    for name in dict.fromkeys(each.contestant for each in found):
        mine = {each.busy: each for each in found if each.contestant == name}
        said = "; ".join(dict.fromkeys(each.told for each in mine.values()))
        rows.append([name, *(f"{mine[busy].several:.1f} of {mine[busy].worked:.1f}" for busy in (False, True)), said])
    head = ["", "idle pool: two led, of seconds worked", "with light traffic", "told"]
    return ["## Through PgBouncer in transaction mode", "", *table(head, rows)]


def standing_by(found: Sequence[StandingBy]) -> list[str]:
    rows = [
        [
            str(each.standbys),
            f"{each.statements_per_second:.1f}",
            str(each.connections),
            f"{each.cpu_percent:.1f} %",
            f"{10 * each.cpu_percent / each.statements_per_second:.1f} ms",
            f"{each.backend_mib:.1f}",
        ]
        for each in found
    ]
    head = [
        "stand-bys", "statements a second", "connections", "server CPU, of one core", "a heartbeat", "MiB a backend",
    ]  # fmt: skip
    most = found[-1]
    frugal = most.statements_per_second < 1.1 * (most.standbys + 1) and most.connections == most.standbys + 1
    wanted = [
        ["one connection and about one statement a second for each", verdict(frugal)],
        [
            f"a server that does not notice {most.standbys} stand-bys: below 10 % of a core",
            verdict(most.cpu_percent < 10),
        ],
    ]
    return [
        "## Standing by",
        "",
        "A leader and stand-bys with three roles each, and one heartbeat for all roles.",
        "",
        *table(head, rows),
        "",
        *table(["goal", ""], wanted),
    ]


def process(found: Process) -> list[str]:
    start = statistics.median(found.start_to_leading)
    rows = [
        ["start to leading", f"{spread(found.start_to_leading)} s", "0.6 s", verdict(start < 0.6)],
        ["import", f"{spread(found.import_seconds)} s", "", ""],
        ["memory of a stand-by, resident", f"{found.resident_mib:.1f} MiB", "50 MiB", verdict(found.resident_mib < 50)],
        ["its share of that (PSS)", f"{found.proportional_mib:.1f} MiB", "", ""],
        [f"CPU of a stand-by over {IDLE:g} s", f"{found.cpu_percent:.2f} %", "0.3 %", verdict(found.cpu_percent < 0.3)],
    ]
    return ["## The process", "", *table(["", "measured", "goal", ""], rows)]


def poller(found: Poller) -> list[str]:
    service = found.throughput[0].queue
    per_cpu = medians(found.throughput, "tasks_per_cpu_second")
    rows = []
    for each in found.throughput:
        better = max((per_cpu[key] for key in per_cpu if key[0] != service and key[1] == each.behind), default=0)
        ratio = per_cpu[each.queue, each.behind] / better if better else 0
        said = f"{ratio:.1f} times the better one; goal 2: {verdict(ratio >= 2)}"
        rows.append(
            [
                each.queue,
                f"{each.behind:,}",
                spread(each.tasks_per_second, 0),
                spread(each.tasks_per_cpu_second, 0),
                said if better and each.queue == service else "",
            ]
        )
    rates = [rate for (name, _), rate in medians(found.throughput, "tasks_per_second").items() if name == service]
    slow, wake = min(rates) / max(rates), sorted(found.wake_up_ms)
    late = wake[int(len(wake) * 0.95)]
    plans = [line for name, plan in found.plans.items() for line in ("", f"`{name}`", "", "```text", *plan, "```")]
    return [
        "## Poller",
        "",
        "One worker process and one trivial task, which inserts one row; so many done rows, and at least as many waiting",
        "ones, behind it. A second of CPU is one of the worker and the server together. This service runs up to 500 tasks in",
        "one transaction, so exactly once; the tasks of the others commit one by one, and may run again after a crash.",
        "",
        *table(["", "rows behind", "tasks a second", "tasks a second of CPU", ""], rows),
        "",
        f"At its slowest size this service runs {slow:.0%} of its fastest; 5,000 a second: {verdict(min(rates) >= 5000)}. From NOTIFY to the",
        f"effect in an idle queue (n = {len(wake)}): median {statistics.median(wake):.1f} ms, 95 % below {late:.1f} ms, at most",
        f"{wake[-1]:.1f} ms.",
        "",
        "<details><summary>Plans of its statements, with the most rows behind it</summary>",
        *plans,
        "",
        "</details>",
    ]


def generated(found: Sequence[Generated]) -> list[str]:
    rows = [[each.name, spread(each.seconds), str(each.files)] for each in found]
    return ["## Generation", "", *table(["", "seconds", "files"], rows)]


def first_minute(found: FirstMinute) -> list[str]:
    said = verdict(statistics.median(found.seconds) < 20)
    return [
        "From nothing (no virtual environment, warm package cache) to three replicas with a leader for each role, by the",
        f"command in README: {spread(found.seconds, 1)} s; goal 20 s: {said}.",
    ]


def picture(trials: Sequence[Trial]) -> str:
    """A row for each contestant, a column for each fault: grey is nobody, red is two."""
    faults = [fault for fault in FAULTS if any(trial.fault == fault for trial in trials)]
    left, column, row, head = 262, 128, 34, 52
    scale = (column - 16) / WATCHED
    parts = []
    for index, fault in enumerate(faults):
        at = left + column * index
        parts.append(f'<text x="{at}" y="38">{escape(fault)}</text>')
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{head}" y2="{head + row * len(names(trials))}"/>')
    for line, name in enumerate(names(trials)):
        y = head + row * line
        parts.append(f'<text class="end" x="{left - 12}" y="{y + 20}">{escape(name)}</text>')
        for index, fault in enumerate(faults):
            mine = [trial for trial in trials if (trial.contestant, trial.fault) == (name, fault)]
            for offset, kind in enumerate(("nobody", "several")):
                seconds = statistics.median(getattr(trial, kind) for trial in mine) if mine else 0
                width = max(1.5, min(seconds, WATCHED) * scale) if seconds > 0.005 else 0
                style = "nobody" if kind == "nobody" else "two"
                parts.append(
                    f'<rect class="{style}" x="{left + column * index}" y="{y + 6 + 11 * offset}" '
                    f'width="{width:.1f}" height="10"><title>{seconds:.2f} s</title></rect>'
                )
    width, height = left + column * len(faults), head + row * len(names(trials)) + 36
    legend = (
        f"grey: seconds in which nobody worked · red: two worked at once · a full column is {WATCHED:g} s · medians"
    )
    parts.append(f'<text class="quiet" x="12" y="{height - 12}">{escape(legend)}</text>')
    drawing = "\n".join(parts)
    title = "After a fault: nobody works, or two do"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n<title>{title}</title>\n'
        f'<style>{STYLE}</style>\n<rect class="back" width="100%" height="100%"/>\n'
        f'<text x="12" y="18">{title}</text>\n{drawing}\n</svg>\n'
    )


KINDS: dict[str, Callable[..., Any]] = {
    "failover": Trial,
    "poolers": Pooled,
    "standing_by": StandingBy,
    "process": Process,
    "poller": Poller,
    "generation": Generated,
    "first_minute": FirstMinute,
}

SECTIONS: dict[str, Callable[[Any], list[str]]] = {
    "poolers": poolers,
    "standing_by": standing_by,
    "process": process,
    "poller": poller,
    "generation": generated,
    "first_minute": first_minute,
}


def load(directory: Path, versions: Sequence[str]) -> dict[str, Any]:
    """What an earlier run of the same versions on the same machine has found, so that one part can be measured again."""
    path = directory / "bench.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    if (document.pop("machine", None), document.pop("versions", None)) != (machine(), list(versions)):
        return {}
    return {part: _loaded(part, data) for part, data in document.items()}


def _loaded(part: str, data: Any) -> Any:
    kind = KINDS[part]
    if isinstance(data, list):
        return [each if isinstance(each, str) else kind(**each) for each in data]
    found = kind(**data)
    return replace(found, throughput=[Throughput(**each) for each in found.throughput]) if part == "poller" else found


def write(results: Results, directory: Path, versions: Sequence[str]) -> None:
    """Write bench.json, bench.md and bench-failover.svg."""
    as_data = {
        part: [asdict(each) if not isinstance(each, str) else each for each in found]
        if isinstance(found, list)
        else asdict(found)
        for part, found in results.items()
    }
    document = {"machine": machine(), "versions": list(versions), **as_data}
    (directory / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    parts: list[list[str]] = []
    if found := results.get("failover"):
        trials = [trial for trial in found if isinstance(trial, Trial)]
        failed = [f"- failed: {trial}" for trial in found if isinstance(trial, str)]
        parts.append([*failover(trials), *(["", *failed] if failed else [])])
        (directory / "bench-failover.svg").write_text(picture(trials))
    for part, section in SECTIONS.items():
        if part in results:
            parts.append(section(results[part]))
    head = [
        "# Measured side by side",
        "",
        f"By `uv run python -m bench` on {machine()}; {', '.join(versions)}.",
        "All on loopback and in network namespaces of its own; same faults, same recorder and same checker for all. Data:",
        "[bench.json](bench.json).",
    ]
    text = "\n\n".join("\n".join(part) for part in [head, *parts]) + "\n"
    (directory / "bench.md").write_text(text)
