"""The environment that tests give to what they start."""

import os

OURS = (
    "VIRTUAL_ENV",
    "PYTEST",
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",  # without byte code a replica takes twice as long to start as a user's
    "UV_PROJECT",
    "UV_RUN",
    "ACME_BILLING_",
    "COLUMNS",
)


def clean_environment(**more: str) -> dict[str, str]:
    """This process's, less what would reach a service's settings, its start, or where its tools look for packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)} | more
