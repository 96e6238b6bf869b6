"""The one decorator through which all numba code of the package is compiled.

Compiled code is cached on disk where numba finds a writable place; where it finds none (a read-only install and no
home directory), numba raises while the decorator runs. Then the function is compiled without a cache, and one log
line says so.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core.errors import NumbaWarning

_log = logging.getLogger("dsa")
_F = TypeVar("_F", bound=Callable[..., Any])
_uncached: list[str] = []


def kernel(function: _F) -> _F:
    """Compile `function` with numba: nogil, numpy error model, cached on disk where that is possible."""
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError as error:
        if not _uncached:
            _log.warning("compiled code is not cached, each process compiles anew: %s", error)
        _uncached.append(function.__qualname__)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumbaWarning)
            return numba.njit(**options)(function)  # type: ignore[no-any-return]
