"""The command's way in, and what `python -m {{cookiecutter.project_slug}}` runs."""

import os
import signal
import sys


def main() -> int:
    """Run the command; returns its exit code."""
    # The kernel drops a signal for process 1 that has no handler, as a container's SIGTERM during the imports below:
    # they take 0.3 s, `run` then has a handler of its own. Python's own start, 0.02 s before this, remains.
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    from .cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
