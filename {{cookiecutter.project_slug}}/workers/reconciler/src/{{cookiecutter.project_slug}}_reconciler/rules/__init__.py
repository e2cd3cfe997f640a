"""Retention: each module beside this one declares rules in a list named RULES."""

import pkgutil
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import LiteralString


@dataclass(frozen=True)
class Rule:
    """Rows of `table` go when `column` is older than `keep`.

    Args:
        table: with its schema, such as "public.event".
        column: a timestamptz that an index begins with, else each batch reads the whole table.
        keep: how long.
        where: SQL that must be true as well; it calls the row `old`.
        batch: the most rows of one transaction, and so of one lock.
    """

    table: str
    column: str
    keep: timedelta
    where: LiteralString = "true"
    batch: int = 1000

    def __post_init__(self) -> None:
        if self.table.count(".") != 1:
            raise ValueError(f"retention of {self.table!r}: name the table with its schema, as in 'public.event'")
        if self.keep <= timedelta():
            raise ValueError(f"retention of {self.table!r}: keep={self.keep} would delete every row")
        if self.batch < 1:
            raise ValueError(f"retention of {self.table!r}: a batch needs at least one row, not {self.batch}")


def declared() -> list[Rule]:
    """The rules of all modules in this package."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return [rule for module in modules for rule in module.RULES]
