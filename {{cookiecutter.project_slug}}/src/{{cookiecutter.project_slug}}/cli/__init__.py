"""The command. What a subcommand needs is imported when it runs: `--help` answers at once, `run` hears its signals."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

from ..config import ConfigError
from ..keys import DISTRIBUTION
from .commands import EXIT_CONFIG, EXIT_UNREACHABLE, Command, Commands

#: The modules of the subcommands, in the order of `--help`; some are there only with the worker that they are about.
PARTS = ("service", "operation", "job", "tasks", "sweep", "development")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    from ..operate.database import Unreachable

    options = _parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except (ConfigError, Unreachable) as error:
        for line in str(error).splitlines():
            print(f"{DISTRIBUTION}: {line}", file=sys.stderr)
        return EXIT_UNREACHABLE if isinstance(error, Unreachable) else EXIT_CONFIG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # as in `status | head`; the interpreter would complain again when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(DISTRIBUTION, description="Leader-only background workers on PostgreSQL.")
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {version(DISTRIBUTION)}")
    commands = Commands(parser)
    for part in PARTS:
        if find_spec(f".{part}", __package__) is not None:
            import_module(f".{part}", __package__).register(commands)
    return parser
