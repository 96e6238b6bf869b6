"""The first failure, which every later public call raises (rule 10), and what forgets it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dsa.errors import StateFileError, UsageError


class Latch:
    """Keeps the first failure; later ones are its consequences.

    Args:
        condition: of the engine's lock; whoever waits is told of the failure.
    """

    def __init__(self, condition: threading.Condition) -> None:
        self.failure: BaseException | None = None
        self._condition = condition
        self._mendable = False

    def note(self, error: BaseException) -> None:
        """Keep the error, if it is the first; from any thread."""
        with self._condition:
            self.note_locked(error)

    def note_locked(self, error: BaseException) -> None:
        """Keep the error, if it is the first; the caller holds the lock."""
        if self.failure is None:
            self.failure = _without_traceback(error)
        self._condition.notify_all()

    def note_until_load(self, error: BaseException) -> None:
        """Note a failure that spoilt only what is in memory: loading a generation mends it."""
        self.note(error)
        self._mendable = True

    def raise_failure(self) -> None:
        """Raise what was noted."""
        if self.failure is not None:
            raise _without_traceback(self.failure)

    @contextmanager
    def recovered(self) -> Iterator[None]:
        """Inside, a failure that a whole state put over it mends is forgotten: an interrupt, or a damaged record.

        It is back where that comes to nothing and leaves no failure of its own.

        Raises:
            DsaError: the failure was the disk's: no retry after a failed write or sync (rule 10).
        """
        before = self.failure, self._mendable
        if not (self._mendable or isinstance(self.failure, (UsageError, StateFileError))):
            self.raise_failure()
        try:
            self.failure, self._mendable = None, False
            yield
        except BaseException:
            if self.failure is None:
                self.failure, self._mendable = before
            raise


def _without_traceback(error: BaseException) -> BaseException:
    """An error like this one that was never raised: a traceback keeps its frames alive, and all that they hold."""
    try:
        twin = copy.copy(error)
    except Exception:
        return error
    return twin if type(twin) is type(error) else error
