"""The reconciler: one leader deletes the rows that have outlived their retention."""

from {{cookiecutter.project_slug}} import Worker

from .sweep import run

__all__ = ["worker"]

# Fenced: every delete happens inside lease.transaction(), so it starts at once after any kind of takeover.
worker = Worker(run, effects="fenced")
