"""Which function handles which kind of task."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

import psycopg

from {{cookiecutter.project_slug}} import Lease


@dataclass(frozen=True)
class Task:
    """One attempt at a task.

    Effects outside the database may be repeated: send `id` along, by which the other side can tell.
    """

    id: int
    kind: str
    payload: dict[str, Any]
    attempt: int  # the first one is 1


Sync = Callable[[psycopg.Connection[Any], Task], None]
Async = Callable[[psycopg.AsyncConnection[Any], Task], Awaitable[None]]
External = Callable[[Lease, Task], Awaitable[None] | None]

T = TypeVar("T", bound=Sync | Async)
E = TypeVar("E", bound=External)


@dataclass(frozen=True)
class Handler:
    """A function and how it is to be called."""

    function: Callable[[Any, Task], Any]
    max_attempts: int
    concurrency: int
    transactional: bool

    @property
    def asynchronous(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def batched(self) -> bool:
        """Whether many of its tasks share one transaction."""
        return self.transactional and not self.asynchronous


HANDLERS: dict[str, Handler] = {}


@overload
def handler(kind: str, *, max_attempts: int = 15, concurrency: int = 4) -> Callable[[T], T]: ...
@overload
def handler(
    kind: str, *, max_attempts: int = 15, concurrency: int = 4, transactional: Literal[False]
) -> Callable[[E], E]: ...
def handler(
    kind: str, *, max_attempts: int = 15, concurrency: int = 4, transactional: bool = True
) -> Callable[[Any], Any]:
    """Register a function, `def` or `async def`, as the handler of all tasks of a kind.

    Args:
        kind: as given to `enqueue`.
        max_attempts: the task is dead when so many have failed; 15 take about four hours.
        concurrency: how many of its tasks run at the same time; those of a transactional `def` run one by one.
        transactional: whether it gets the connection whose commit also ends the task, or the lease.

    Raises:
        ValueError: the kind has a handler already, or a number is less than one.
    """
    if kind in HANDLERS:
        raise ValueError(f"tasks of kind {kind!r} have two handlers; give one of them another kind")
    for name, number in (("max_attempts", max_attempts), ("concurrency", concurrency)):
        if number < 1:
            raise ValueError(f"the handler of kind {kind!r} needs {name} of at least 1, not {number}")

    def register(function: Any) -> Any:
        HANDLERS[kind] = Handler(function, max_attempts, concurrency, transactional)
        return function

    return register


def effects() -> Literal["external", "fenced"]:
    """How far the effects of all registered handlers reach."""
    return "fenced" if all(handler.transactional for handler in HANDLERS.values()) else "external"
