"""The queue's rule: done tasks go, dead ones stay until somebody has looked at them."""

from datetime import timedelta

from . import Rule

RULES = [
    Rule("{{cookiecutter.project_slug}}.task", "finished_at", keep=timedelta(days=7), where="old.state = 'done'"),
]
