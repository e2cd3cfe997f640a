"""The poller: one leader takes due tasks from the queue and runs the handler registered for their kind."""

from {{cookiecutter.project_slug}} import Worker

from . import handlers
from .poller import run

__all__ = ["handlers", "worker"]

# Fenced: everything it does happens inside lease.transaction(), so it starts at once after any kind of takeover.
worker = Worker(run, effects="fenced")
