"""A stream of random numbers beside training's: inside it the global generators go on where it ended last.

Swapped in and out around every batch that is fetched, so it costs microseconds: numpy's global generator is not copied
out and in but exchanged (its state is 2.5 KB, and numpy takes 0.1 ms to hand it over as Python objects).
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_KEPT = struct.Struct("@id")  # in a RandomState: whether it keeps a normal number, and that
_KEPT_AFTER = _KEPT.size - struct.calcsize("d")


class RandomStream:
    """A context in which torch's CPU generator, numpy's global one and `random` go on where the last such one ended.

    After it they are as they were before it.
    """

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator("cpu").manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        self._numpy = _Numpy(np.random.MT19937(np.random.SeedSequence(seed)))
        self._outside: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state(), random.getstate()
        self._numpy.enter()
        torch.set_rng_state(self._torch)
        random.setstate(self._python)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy.leave()
        if self._outside is not None:
            torch.set_rng_state(self._outside[0])
            random.setstate(self._outside[1])


class _Numpy:
    """Numpy's global bit generator, exchanged for another one and back.

    Legacy normal numbers are drawn in pairs; the second one is kept beside the bit generator, and lost in an exchange
    unless it is put back.
    """

    def __init__(self, bits: Any) -> None:
        self._inside = bits
        self._inside_kept: float | None = None
        self._outside = bits
        self._outside_kept: float | None = None

    def enter(self) -> None:
        self._outside, self._outside_kept = mtrand.get_bit_generator(), _kept()
        _use(self._inside, self._inside_kept)

    def leave(self) -> None:
        self._inside, self._inside_kept = mtrand.get_bit_generator(), _kept()
        _use(self._outside, self._outside_kept)


def _use(bits: Any, kept: float | None) -> None:
    mtrand.set_bit_generator(bits)
    if kept is not None:
        state: Any = np.random.get_state(legacy=False)
        np.random.set_state({**state, "has_gauss": 1, "gauss": kept})


def _kept() -> float | None:
    """The normal number that the global generator keeps, if it keeps one."""
    place = _place_of_kept()
    if place is None:
        return _told_kept(np.random)
    address = id(_generator()) + place
    if not ctypes.c_int.from_address(address).value:
        return None
    return ctypes.c_double.from_address(address + _KEPT_AFTER).value


def _generator() -> Any:
    """What numpy's global functions draw from: they are its methods."""
    get_state: Any = np.random.get_state
    return get_state.__self__


def _told_kept(generator: Any) -> float | None:
    state: Any = generator.get_state(legacy=False)
    return float(state["gauss"]) if state["has_gauss"] else None


@functools.cache
def _place_of_kept() -> int | None:
    """The byte of a RandomState that says whether it keeps a number, which lies right behind; None: ask numpy itself.

    Numpy has no quick way to ask: it hands over 2.5 KB of state with the answer. So the place is looked for in one
    generator, and taken only where it tells the truth about others, with a number kept and without.
    """
    if sys.implementation.name != "cpython" or type(_generator()) is not np.random.RandomState:
        return None  # only there an object's id is its address
    size = np.random.RandomState.__basicsize__
    drawn = np.random.RandomState(1)
    drawn.standard_normal()
    place = ctypes.string_at(id(drawn), size).find(struct.pack("d", _told_kept(drawn))) - _KEPT_AFTER
    if place < 0:
        return None
    for draws in range(4):
        other = np.random.RandomState(2)
        other.standard_normal(draws)
        raw = ctypes.string_at(id(other), size)
        keeps, kept = _KEPT.unpack_from(raw, place)
        if (kept if keeps else None) != _told_kept(other):
            return None
    return place
