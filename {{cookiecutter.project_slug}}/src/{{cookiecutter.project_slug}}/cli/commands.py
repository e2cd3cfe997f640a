"""What the subcommands have in common: how one is declared, and the exit codes."""

import argparse
from collections.abc import Callable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_UNREACHABLE = 75
EXIT_CONFIG = 78

Command = Callable[[argparse.Namespace], int]


class Commands:
    """The subcommands of a parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(self, name: str, command: Command, what: str, example: str) -> argparse.ArgumentParser:
        """Declare a subcommand; `what` is half a sentence for both helps, `example` a line to type."""
        added = self._add(name, what, example)
        added.set_defaults(command=command)
        return added

    def group(self, name: str, what: str, example: str) -> "Commands":
        """Declare a subcommand that has subcommands of its own."""
        return Commands(self._add(name, what, example))

    def _add(self, name: str, what: str, example: str) -> argparse.ArgumentParser:
        return self._commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
