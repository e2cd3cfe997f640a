"""The queue: done tasks go, dead ones stay until somebody has looked at them; those of a dead leader are put back."""

from datetime import timedelta

from {{cookiecutter.project_slug}}.task import requeue

from . import Rule

RULES = [
    Rule("{{cookiecutter.project_slug}}.task", "finished_at", keep=timedelta(days=7), where="old.state = 'done'"),
]
REPAIRS = [requeue]
