"""What is put right at each sweep: the modules beside this one declare retention in RULES and other work in REPAIRS."""

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from types import ModuleType
from typing import Any, LiteralString

import psycopg

#: Gets a connection in a transaction of its own, puts rows right, and returns how many.
Repair = Callable[[psycopg.Connection[Any]], int]


@dataclass(frozen=True)
class Rule:
    """Rows of `table` go when `column` is older than `keep`.

    Args:
        table: with its schema, such as "public.event".
        column: a timestamptz that an index begins with, else each batch reads the whole table.
        keep: how long.
        where: SQL that must be true as well; it calls the row `old`. Old rows that it keeps are read at each sweep, so
            if those are many, give the index this condition too.
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
    return [rule for module in _modules() for rule in getattr(module, "RULES", [])]


def repairs() -> list[Repair]:
    """The repairs of all modules in this package."""
    return [repair for module in _modules() for repair in getattr(module, "REPAIRS", [])]


def _modules() -> Iterator[ModuleType]:
    for module in pkgutil.iter_modules(__path__):
        yield import_module(f"{__name__}.{module.name}")
