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
    """The backend of that name; for "auto" the one that the config's probe found to be the best, if that works here,
    else the first that does. One log line says which and why.

    Raises:
        ConfigError: there is no such backend, or it (for "auto": every one) cannot work here, and why.
    """
    factories = dict(CANDIDATES)
    if name != "auto" and name not in factories:
        raise ConfigError(f"unknown backend {name!r}: choose one of {', '.join(['auto', *factories])}")
    candidates, why = [name], "asked for by name"
    reasons: list[str] = []
    if name == "auto":
        candidates, why = list(factories), "the best that there is"
        probed = config.probed_backend
        if probed in factories:
            candidates, why = [probed, *(other for other in factories if other != probed)], "chosen by the probe"
        elif probed is not None:
            reasons.append(f"{probed}, chosen by the probe, is not a backend of this program")
    cause: Exception | None = None
    for candidate in candidates:
        try:
            backend = factories[candidate](config)
        except Exception as error:
            # Whatever keeps one from working (an old kernel, a filter of system calls), the next may work.
            chosen = ", chosen by the probe," if name == "auto" and candidate == config.probed_backend else ""
            reasons.append(f"{candidate}{chosen} cannot work here: {error}")
            cause = error
            continue
        _log.info("backend %s (%s)", candidate, "; ".join(reasons) or why)
        return backend
    raise ConfigError("; ".join(reasons)) from cause
