"""The whole API of a worker author."""

from typing import TYPE_CHECKING

__all__ = ["Lease", "LeaseLost", "Worker"]

if TYPE_CHECKING:
    from .worker import Lease, LeaseLost, Worker
else:

    def __getattr__(name: str) -> object:
        # Imported when asked for, not before: the command must hear signals first, see __main__.py.
        if name in __all__:
            from . import worker

            return getattr(worker, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
