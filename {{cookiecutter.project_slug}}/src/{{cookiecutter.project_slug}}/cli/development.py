"""Commands for the machine of a developer: dev, new-worker."""

import argparse

from ..config import ConfigError
from ..keys import DISTRIBUTION
from .commands import EXIT_OK, Commands


def register(commands: Commands) -> None:
    dev = commands.add(
        "dev", _dev, "show several replicas and a takeover on this machine", f"{DISTRIBUTION} dev --replicas 5"
    )
    dev.add_argument("--replicas", type=_replicas, default=3, help="how many (3)")
    new_worker = commands.add(
        "new-worker",
        _new_worker,
        "add a worker of your own to this project: its package, key, extra, toggle and test",
        f"uv run {DISTRIBUTION} new-worker invoice_mailer",
    )
    new_worker.add_argument("name", metavar="NAME", help="of the worker, its extra and its toggle")


def _dev(options: argparse.Namespace) -> int:
    from ..dev.show import show

    return show(options.replicas)


def _new_worker(options: argparse.Namespace) -> int:
    try:
        from ..dev.new_worker import new_worker
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"new-worker is for a checkout with the dependency group `dev`, and {error.name} is not there; in the"
            f" project's folder, run: uv sync && uv run {DISTRIBUTION} new-worker {options.name}"
        ) from None
    print(new_worker(options.name))
    return EXIT_OK


def _replicas(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 9:
        raise argparse.ArgumentTypeError("between 1 and 9")
    return number
