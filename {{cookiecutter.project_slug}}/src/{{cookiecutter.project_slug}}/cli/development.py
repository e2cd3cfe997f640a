"""Commands for the machine of a developer: dev."""

import argparse

from ..keys import DISTRIBUTION
from .commands import Commands


def register(commands: Commands) -> None:
    dev = commands.add(
        "dev", _dev, "show several replicas and a takeover on this machine", f"{DISTRIBUTION} dev --replicas 5"
    )
    dev.add_argument("--replicas", type=_replicas, default=3, help="how many (3)")


def _dev(options: argparse.Namespace) -> int:
    from ..dev.show import show

    return show(options.replicas)


def _replicas(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 9:
        raise argparse.ArgumentTypeError("between 1 and 9")
    return number
