"""The poller: one leader runs the handlers of queued tasks."""

from {{cookiecutter.project_slug}} import Worker

from . import handlers
from .poller import run
from .registry import effects

__all__ = ["handlers", "worker"]

# Fenced while all handlers are transactional: then a successor starts at once after any kind of end.
worker = Worker(run, effects=effects())
