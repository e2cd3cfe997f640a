"""The scheduler: one leader runs each job once per period."""

from {{cookiecutter.project_slug}} import Worker

from . import jobs
from .scheduler import JOBS, run

__all__ = ["jobs", "worker"]

# While every job is transactional, all effects are fenced, and a successor starts at once after any kind of end.
worker = Worker(run, effects="fenced" if all(job.transactional for job in JOBS.values()) else "external")
