"""The ledger's own rule."""

from datetime import timedelta

from {{cookiecutter.project_slug}} import ledger

from . import Rule

# The last run of each job stays, however old, since what is planned next goes on from there; so does the last success.
NOT_THE_LAST = """
exists (
    select from {{cookiecutter.project_slug}}.job_run as newer
    where newer.job = old.job and newer.period > old.period
        and (old.state <> 'succeeded' or newer.state = 'succeeded')
)
"""

RULES = [
    Rule(
        "{{cookiecutter.project_slug}}.job_run",
        "period",
        # a day more than a period can still be claimed, so that none runs twice
        keep=ledger.MEMORY + timedelta(days=1),
        where=NOT_THE_LAST,
    )
]
