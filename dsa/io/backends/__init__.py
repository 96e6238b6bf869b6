"""The ways to move bytes, best first, and how one of them is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dsa.config import IOConfig
from dsa.errors import ConfigError
from dsa.io.backends.aio import AiofilesBackend
from dsa.io.backends.base import Backend, Bytes, Counters, Extents, File
from dsa.io.backends.threads import ThreadsBackend
from dsa.io.backends.uring import UringBackend

__all__ = [
    "CANDIDATES",
    "AiofilesBackend",
    "Backend",
    "Bytes",
    "Counters",
    "Extents",
    "File",
    "ThreadsBackend",
    "open_backend",
]

_log = logging.getLogger("dsa")

# Best first. A factory raises when its backend cannot work here; what it says is shown to the user.
CANDIDATES: tuple[tuple[str, Callable[[IOConfig], Backend]], ...] = (
    ("uring", UringBackend),
    ("threads", ThreadsBackend),
    ("aiofiles", AiofilesBackend),
)


def open_backend(name: str, config: IOConfig) -> Backend:
    """The backend of that name, or for "auto" the best that works here; one log line says which and why.

    Raises:
        ConfigError: there is no such backend, or it (for "auto": every one) cannot work here, and why.
    """
    known = [candidate for candidate, _ in CANDIDATES]
    if name != "auto" and name not in known:
        raise ConfigError(f"unknown backend {name!r}: choose one of {', '.join(['auto', *known])}")
    reasons: list[str] = []
    cause: Exception | None = None
    for candidate, factory in CANDIDATES:
        if name not in ("auto", candidate):
            continue
        try:
            backend = factory(config)
        except Exception as error:
            # Whatever keeps one from working (an old kernel, a filter of system calls), the next may work.
            reasons.append(f"{candidate} cannot work here: {error}")
            cause = error
            continue
        why = "; ".join(reasons) or ("asked for by name" if name != "auto" else "the best that there is")
        _log.info("backend %s (%s)", candidate, why)
        return backend
    raise ConfigError("; ".join(reasons)) from cause
