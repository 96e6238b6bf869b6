"""The one place through which all numba code of the package is compiled.

Compiled code is cached on disk where numba finds a writable place; where it finds none (a read-only install and no
home directory), it is compiled by each process anew, and one log line says so.

Numba takes cached code for fresh as long as the source file of the function itself is what it was. But kernels and
intrinsics of other modules are compiled into it, and so are the numbers that its names stand for. So the key under
which code is cached here holds those as well.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

_log = logging.getLogger("dsa")
_F = TypeVar("_F", bound=Callable[..., Any])
_uncached: list[str] = []
_NUMBERS = (int, float, complex, str, bytes, type(None), type(...), np.generic, np.dtype)
_NOT_OURS = {"llvmlite", "numba", "numpy", *sys.stdlib_module_names}  # numba's own version is part of every key


def kernel(function: _F) -> _F:
    """Compile `function` with numba: nogil, numpy error model, cached on disk where that is possible."""
    compiled = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    _cache(compiled, function)
    return compiled  # type: ignore[no-any-return]


def callback(function: Callable[..., Any], signature: Any) -> Any:
    """Compile `function` as one that C can call, now; cached on disk where that is possible.

    Returns:
        Numba's object, which owns the code; its `address` is the function's.
    """
    compiled = CFunc(function, sigutils.normalize_signature(signature), {}, {})
    _cache(compiled, function)
    compiled.compile()
    return compiled


def _cache(compiled: Any, function: Callable[..., Any]) -> None:
    try:
        compiled._cache = _Cache(function)
    except RuntimeError as error:
        if not _uncached:
            _log.warning("compiled code is not cached, each process compiles anew: %s", error)
        _uncached.append(function.__qualname__)


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's own, with all that is compiled into a function as a part of the key."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return super()._index_key(sig, codegen), content_of(self._py_func)


def content_of(function: Callable[..., Any]) -> str:
    """A digest of the function and all that is compiled into it: functions that it calls, in any module (and those
    modules' files, for what they do besides), and the numbers that its names stand for.

    Asked for where code is compiled or loaded, not where it is decorated: only then is every name there.
    """
    digest = hashlib.blake2b(_file_digest(__file__), digest_size=16)  # how things are compiled is said here
    for part in _parts(function, set()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any, seen: set[int]) -> Iterator[bytes]:
    """What a value is to compiled code; nothing, where it is none of our code and no number."""
    if isinstance(value, _NUMBERS):
        yield f"{type(value).__name__} {value!r}".encode()
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _parts(each, seen)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(part for each in value for part in _parts(each, seen))
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode() + value.tobytes()
    elif isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__}".encode()
    elif callable(value):
        function = inspect.unwrap(value)  # numba's objects are wrappers of what they compile
        if isinstance(function, FunctionType) and _is_ours(function.__module__) and id(function) not in seen:
            seen.add(id(function))
            code = function.__code__
            yield _file_digest(code.co_filename)
            yield from _parts_of_code(code)
            for each in (*_values(code, function.__globals__), *_cells(function), function.__defaults__):
                yield from _parts(each, seen)


def _parts_of_code(code: CodeType) -> Iterator[bytes]:
    # Of the code in memory too: the file may have been changed since it was imported.
    yield code.co_code
    yield " ".join(code.co_names).encode()
    for each in code.co_consts:
        yield from _parts_of_code(each) if isinstance(each, CodeType) else _parts(each, set())


def _values(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """What the names of other places in the code stand for; also names of our own modules' names."""
    for name in code.co_names:
        value = names.get(name)
        if not isinstance(value, ModuleType):
            yield value
        elif _is_ours(value.__name__):
            yield from (getattr(value, attribute, None) for attribute in code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _values(each, names)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not set yet
            yield None


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _NOT_OURS


@functools.cache
def _file_digest(path: str) -> bytes:
    """Of a source file's bytes; of nothing, where there is none to read (the code itself counts as well)."""
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).digest()
    except OSError:
        return b""
