"""The page that a person looks at: HTML and a little CSS, no script, no address outside, no secret."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from ..gates import Gate
from ..keys import SERVICE
from ..ledger import JobStatus
from ..supervisor import Facts
from .endpoints import Answer
from .picture import Picture
from .status import RoleStatus, State, duration

REFRESH_SECONDS = 3

# Told apart by word and sign, so that colour only helps.
SIGNS = {State.LEADING: "● ", State.WAITING: "◐ ", State.FREE: "○ ", State.COLLISION: "⚠ "}

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --dim: #5c5c5c; --line: #d8d8d8; --paper: #fff; --bad: #a40000; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --dim: #a8a8a8; --line: #444; --paper: #161616; --bad: #ff9c8f; }
}
body { margin: 0 auto; max-width: 72rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
p { margin: .2rem 0; } p.dim, td.dim { color: var(--dim); } .bad { color: var(--bad); font-weight: 600; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
@media (max-width: 48rem) {
  thead { position: absolute; left: -9999px; }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  td { display: grid; grid-template-columns: 7rem 1fr; padding: .05rem 0; border: 0;
    overflow-wrap: anywhere; }
  td::before { content: attr(data-label); color: var(--dim); }
}
"""


def page(facts: Facts, gates: Iterable[Gate], picture: Picture, now: datetime) -> Answer:
    """The page of one replica at one moment."""
    session = facts.journal.connection + (" · stopping" if facts.stopping else "")
    parts = [
        f"<h1>{escape(SERVICE)}</h1>",
        f"<p class=dim>as seen by {escape(facts.instance)} at {_time(now)}</p>",
        f"<p>This replica's session to the database: {escape(session)}</p>",
    ]
    if picture.problem is not None:
        parts.append(
            f"<p class=bad>⚠ The database gives no answer: {escape(picture.problem)}. Below stands only what this replica"
            " knows by itself.</p>"
        )
    parts += ["<h2>Roles</h2>", _roles(facts, gates, picture)]
    if picture.jobs:
        parts += ["<h2>Jobs</h2>", _jobs(picture.jobs)]
    if (queue := picture.backlog) is not None:
        waits = f", the first one for {duration(queue.oldest.total_seconds())}" if queue.waiting else ""
        parts += ["<h2>Tasks</h2>", f"<p>{queue.waiting} due{waits} · {queue.running} running · {queue.dead} dead</p>"]
    parts += [
        "<h2>Takeovers</h2>",
        "<p class=dim>Only those that this replica saw itself, since it was started; the log has all of them.</p>",
        _takeovers(facts),
    ]
    head = (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<meta http-equiv=refresh content={REFRESH_SECONDS}><title>{escape(SERVICE)}</title><style>{STYLE}</style>"
        "</head><body>"
    )
    return Answer(head + "\n".join(parts) + "</body></html>\n", content_type="text/html; charset=utf-8")


def _roles(facts: Facts, gates: Iterable[Gate], picture: Picture) -> str:
    ours = {role.role: role for role in facts.roles}
    seen = {role.role: role for role in picture.roles}
    rows = []
    for gate in gates:
        here, role = ours.get(gate.role), seen.get(gate.role)
        progress = None if here is None else here.progress_age_seconds
        rows.append(
            (
                gate.role,
                gate.state.value,
                *(_seen(role) if role is not None else (here.phase if here else "-", "-", "-", "-", "-")),
                "-" if progress is None else f"{progress:.0f} s ago, here",
            )
        )
    return _table(("Role", "Gate here", "State", "Leader", "Epoch", "Since", "Heartbeat", "Progress"), rows)


def _seen(role: RoleStatus) -> tuple[str, str, str, str, str]:
    standbys = f" · {len(role.standbys)} standing by"
    since = "-" if role.leading_since is None else f"{_time(role.leading_since)}, {duration(role.leading_seconds)}"
    heartbeat = "-" if role.heartbeat_age_seconds is None else f"{role.heartbeat_age_seconds:.1f} s ago"
    holder = f"{role.holder} (pid {role.holder_pid})" if role.holder is not None else "nobody"
    return SIGNS[role.state] + role.state.value + standbys, holder, str(role.epoch), since, heartbeat


def _jobs(jobs: Iterable[JobStatus]) -> str:
    rows = []
    for job in jobs:
        last = "never" if job.state is None else f"{job.state}, {_time(job.finished_at or job.started_at)}"
        late = "" if not job.overdue_seconds else f" ⚠ overdue by {duration(job.overdue_seconds)}"
        next_run = "-" if job.next_period is None else _time(job.next_period) + late
        rows.append((job.job, job.schedule or "-", last, next_run))
    return _table(("Job", "Schedule", "Last run", "Next run"), rows)


def _takeovers(facts: Facts) -> str:
    rows = [
        (_time(datetime.fromtimestamp(takeover.at, UTC)), takeover.role, str(takeover.epoch), takeover.holder)
        for takeover in reversed(list(facts.journal.takeovers))
    ]
    return _table(("Time", "Role", "Epoch", "New leader"), rows) if rows else "<p>none yet</p>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"<table><thead><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr></thead><tbody>"]
    for row in rows:
        cells = [f'<td data-label="{escape(head)}">{escape(cell)}</td>' for head, cell in zip(heads, row, strict=True)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _time(time: datetime | None) -> str:
    return "-" if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
