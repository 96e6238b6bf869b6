"""What compiled regions need of numba beyond its loops: memory and functions by address, and two machine operations."""

from __future__ import annotations

import ctypes
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray


def _at_address(typing_context: Any, address: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), make


def _claim(typing_context: Any, address: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        cell = builder.inttoptr(arguments[0], cgutils.intp_t.as_pointer())
        return builder.atomic_rmw("add", cell, cgutils.intp_t(1), "monotonic")

    return types.int64(types.int64), make


def _prefetch(typing_context: Any, address: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        builder.call(function, [pointer, number(0), number(2), number(1)])  # to the second cache: more lines at once
        return context.get_dummy_value()

    return types.void(types.int64), make


def _call_on_array(typing_context: Any, function: Any, count: Any, address: Any, mode: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = cgutils.intp_t
        kind = ir.FunctionType(ir.VoidType(), [number, cgutils.voidptr_t, cgutils.voidptr_t, number])
        called = builder.inttoptr(arguments[0], kind.as_pointer())
        pointer = builder.inttoptr(arguments[2], cgutils.voidptr_t)
        builder.call(called, [arguments[1], pointer, pointer, arguments[3]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), make


def address_of(array: NDArray[Any]) -> int:
    """Where an array's memory begins."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def address_of_own(array: NDArray[Any]) -> int:
    """The same, sooner, for an array that is contiguous, writable and not empty."""
    return ctypes.addressof(_Byte.from_buffer(array))


_Byte: Any = ctypes.c_char
carray: Any = numba.carray
at_address: Any = intrinsic(_at_address)  # (int64) -> the pointer with this address
claim: Any = intrinsic(_claim)  # (address of an int64) -> its value, raised by one in the same instant
prefetch: Any = intrinsic(_prefetch)  # (address) -> have its line brought near; it need not be valid
# (function, count, address, mode) -> call C's void function(int64 count, const T *in, T *out, int64 mode) in place
call_on_array: Any = intrinsic(_call_on_array)
