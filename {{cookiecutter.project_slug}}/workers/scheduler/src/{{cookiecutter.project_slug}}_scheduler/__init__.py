"""The scheduler: one leader runs each job once per period."""

from {{cookiecutter.project_slug}} import Worker

from . import jobs
from .job import JOBS
from .once import run_job
from .scheduler import run

__all__ = ["jobs", "worker"]

# While every job is transactional, all effects are fenced, and a successor starts at once after any kind of end.
fenced = all(job.transactional for job in JOBS.values())

worker = Worker(run, effects="fenced" if fenced else "external", run_job=run_job)
