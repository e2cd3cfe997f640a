"""The environment that tests give to what they start."""

import os

OURS = ("VIRTUAL_ENV", "PYTEST", "PYTHONPATH", "UV_PROJECT", "UV_RUN", "ACME_BILLING_", "COLUMNS")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's, less what would reach a service's settings or make its tools look into our virtual environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)} | more
