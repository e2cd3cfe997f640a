"""The reconciler: one leader deletes rows that have outlived their retention, and puts right what was left behind."""

from {{cookiecutter.project_slug}} import Worker

from .retention import examine, sweep_by_hand
from .sweep import run

__all__ = ["worker"]

# Fenced: every write happens inside lease.transaction(), so it starts at once after any kind of takeover.
worker = Worker(run, effects="fenced", examine=examine, sweep=sweep_by_hand)
