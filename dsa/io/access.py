"""The engine's one lock, and the only way to the bookkeeping behind it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType

from dsa.errors import DsaError, UsageError
from dsa.io.bookkeeping import Bookkeeping


class Access:
    """`with access as books:` holds the lock. An interrupt that leaves the bookkeeping half-changed is latched.

    Args:
        latch: called, under the lock, with the error that every later call is to raise.
    """

    def __init__(self, books: Bookkeeping, latch: Callable[[BaseException], None]) -> None:
        self._lock = threading.RLock()
        self.condition = threading.Condition(self._lock)
        self._books = books
        self._latch = latch
        self._harmless: BaseException | None = None  # an interrupt that came while its thread waited

    def __enter__(self) -> Bookkeeping:
        self.let_go()
        self._lock.acquire()
        return self._books

    def let_go(self) -> None:
        """Release the lock where an interrupt on the edge of a `with` has left it with this thread, for nobody else
        could ever take it; called outside every `with`."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]  # what threading.Condition asks of a lock too
            return
        self._lock.release()
        error = UsageError(
            "an interrupt came while the engine kept its books, which may now be wrong; load_state_dict() a "
            "checkpoint together with the model, or close() and resume"
        )
        with self.condition:
            self._latch(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._harmless is None:
            self._lock.release()
            return
        try:
            if error is not None and error is not self._harmless and not isinstance(error, DsaError):
                self._latch(
                    UsageError(
                        f"{type(error).__name__} ({error}) came while the engine kept its books, which may now be "
                        "wrong; load_state_dict() a checkpoint together with the model, or close() and resume"
                    )
                )
            self._harmless = None
        finally:
            with contextlib.suppress(RuntimeError):  # an interrupt in wait() before it had taken the lock again
                self.condition.release()
        # An interrupt inside a compiled function's dispatch comes out as the cause of a SystemError.
        if isinstance(error, SystemError) and isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__

    def wait(self) -> None:
        """Wait, inside `with`, until something has changed; an interrupt while waiting harms nothing."""
        try:
            self.condition.wait()
        except BaseException as error:
            self._harmless = error  # told by the error itself: while this thread waited, others came and went
            raise
