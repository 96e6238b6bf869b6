"""Three machine operations that numba has no name for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def at_address(typing_context: Any, address: Any) -> Any:
    """The pointer with this address."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), make


@intrinsic
def claim(typing_context: Any, address: Any) -> Any:
    """The value of the int64 at this address, raised by one in the same instant."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        cell = builder.inttoptr(arguments[0], cgutils.intp_t.as_pointer())
        return builder.atomic_rmw("add", cell, cgutils.intp_t(1), "monotonic")

    return types.int64(types.int64), make


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Have the line at this address brought near, for writing; the address need not be valid."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        builder.call(function, [pointer, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), make
