"""A wall clock that a test moves while processes run. Needs a C compiler."""

import struct
import subprocess
from pathlib import Path

from .servers import Postgres, embedded_binaries, ordinary_user_prefix

SOURCE = Path(__file__).with_name("wall_clock.c")


class WallClock:
    """The wall clock of those processes that are started with its prefix; their other clocks are real."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        library = directory / "wall_clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-o", library, SOURCE], check=True)
        self._path = directory / "seconds"
        self.move_to(0)
        self.prefix = ("env", f"LD_PRELOAD={library}", f"WALL_CLOCK={self._path}")

    def move_to(self, seconds_ahead: int) -> None:
        """Jump."""
        # opened so that the processes' mapping of the file stays valid
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds_ahead))


class PostgresWithClock(Postgres):
    """A PostgreSQL whose wall clock can be moved."""

    def __init__(self, directory: Path, clock: WallClock) -> None:
        super().__init__(directory, embedded_binaries())
        self._clock = clock

    def spawn(self, *command: str | Path, prefix: tuple[str, ...] = ()) -> None:
        super().spawn(*command, prefix=(*ordinary_user_prefix(), *self._clock.prefix, *prefix))
