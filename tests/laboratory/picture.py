"""Draws the record of a run as SVG: a lane for each replica, time to the right, a bar for each term, a mark for each fault."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .record import Report

LEFT, WIDTH, RIGHT = 104, 860, 24  # of the drawing area, in pixels
HEAD, LANE, BAR, FOOT = 44, 60, 16, 52

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .back { fill: #ffffff } .quiet { fill: #59636e } .end { text-anchor: end } .middle { text-anchor: middle }
  .life { fill: #eaeef2 } .grid { stroke: #d1d9e0 } .fault { stroke: #cf222e; stroke-dasharray: 4 3 }
  .fault-text { fill: #cf222e } .on-bar { fill: #ffffff }
  .role-0 { fill: #0969da } .role-1 { fill: #8250df } .role-2 { fill: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .back { fill: #0d1117 } .quiet { fill: #9198a1 } .life { fill: #21262d }
    .grid { stroke: #30363d } .fault { stroke: #ff7b72 } .fault-text { fill: #ff7b72 }
  }
"""


@dataclass(frozen=True)
class Life:
    """A replica's process: a lane of the picture. Times are seconds on the record's clock."""

    name: str
    pid: int
    began: float
    ended: float


@dataclass(frozen=True)
class Fault:
    """What was done to a replica, and when."""

    what: str
    pid: int
    at: float


def draw(title: str, report: Report, roles: Sequence[str], lives: Sequence[Life], faults: Sequence[Fault]) -> str:
    """The picture as SVG, for light and dark pages. `roles` are drawn in their order, at most three."""
    begin = min(life.began for life in lives)
    end = max(life.ended for life in lives)
    lane_of = {life.pid: index for index, life in enumerate(lives)}
    bottom = HEAD + LANE * len(lives)

    def x(at: float) -> float:
        return LEFT + (at - begin) / (end - begin) * WIDTH

    def top(pid: int) -> int:
        return HEAD + LANE * lane_of[pid]

    def box(kind: str, start: float, stop: float, y: float, height: float, tip: str) -> str:
        width = max(x(stop) - x(start), 1)
        return (
            f'<rect class="{kind}" x="{x(start):.1f}" y="{y:g}" width="{width:.1f}" height="{height}" rx="2">'
            f"<title>{escape(tip)}</title></rect>"
        )

    def text(kind: str, at: float, y: float, words: str) -> str:
        return f'<text class="{kind}" x="{at:.1f}" y="{y:g}">{escape(words)}</text>'

    parts = [text("", LEFT, 18, title)]
    for second in range(0, int(end - begin) + 1, 2):
        at = x(begin + second)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{HEAD}" y2="{bottom}"/>')
        parts.append(text("quiet middle", at, bottom + 16, f"{second} s"))
    for life in lives:
        y = top(life.pid)
        parts.append(text("end", LEFT - 10, y + LANE / 2 + 4, life.name))
        parts.append(box("life", life.began, life.ended, y + 6, LANE - 12, f"{life.name}, process {life.pid}"))
    for index, role in enumerate(roles):
        for term in report.terms.get(role, []):
            bar = top(term.pid) + LANE / 2 + BAR * (index - len(roles) / 2)
            tip = f"{role}, epoch {term.epoch}: {term.units} units of work"
            parts.append(box(f"role-{index}", term.first, term.last, bar + 1, BAR - 2, tip))
            if x(term.last) - x(term.first) > 60:
                parts.append(text("on-bar", x(term.first) + 5, bar + BAR - 4, f"epoch {term.epoch}"))
        parts.append(f'<rect class="role-{index}" x="{LEFT + 170 * index}" y="{bottom + 30}" width="12" height="12"/>')
        parts.append(text("", LEFT + 170 * index + 18, bottom + 40, f"{role} works"))
    for fault in faults:
        at, y = x(fault.at), top(fault.pid)
        parts.append(f'<line class="fault" x1="{at:.1f}" x2="{at:.1f}" y1="{HEAD}" y2="{bottom}"/>')
        parts.append(f'<circle class="fault-text" cx="{at:.1f}" cy="{y + LANE / 2:g}" r="4"/>')
        parts.append(text("fault-text middle", at, HEAD - 8, fault.what))
    size = f"{LEFT + WIDTH + RIGHT} {bottom + FOOT}"
    drawing = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">\n<title>{escape(title)}</title>\n'
        f'<style>{STYLE}</style>\n<rect class="back" width="100%" height="100%"/>\n{drawing}\n</svg>\n'
    )
