"""A stream of random numbers beside training's: inside it the global generators go on where it ended last.

Swapped in and out around every batch that is fetched, so it costs microseconds: numpy's global generator is not copied
out and in but exchanged (its state is 2.5 KB, and numpy takes 0.1 ms to hand it over as Python objects).
"""

from __future__ import annotations

import ctypes
import random
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_MT19937_BYTES = 4 * 625  # 624 words and a position in them


class RandomStream:
    """A context in which torch's CPU generator, numpy's global one and `random` go on where the last such one ended.

    After it they are as they were before it.
    """

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
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
        self._words = _words(bits)
        self._outside = bits
        self._outside_kept: float | None = None

    def enter(self) -> None:
        self._outside, self._outside_kept = mtrand.get_bit_generator(), _kept()
        _use(self._inside, self._inside_kept)

    def leave(self) -> None:
        bits = mtrand.get_bit_generator()
        words = _words(bits)
        # Where nothing was drawn, nothing was drawn in advance either; asking numpy takes as long as all the rest.
        if bits is not self._inside or words is None or words != self._words or self._inside_kept is not None:
            self._inside, self._inside_kept, self._words = bits, _kept(), words
        _use(self._outside, self._outside_kept)


def _kept() -> float | None:
    state: Any = np.random.get_state(legacy=False)
    return float(state["gauss"]) if state["has_gauss"] else None


def _use(bits: Any, kept: float | None) -> None:
    mtrand.set_bit_generator(bits)
    if kept is not None:
        state: Any = np.random.get_state(legacy=False)
        np.random.set_state({**state, "has_gauss": 1, "gauss": kept})


def _words(bits: Any) -> bytes | None:
    """A copy of the state, to compare; None of kinds whose state has another form."""
    if type(bits) is not np.random.MT19937:
        return None
    return ctypes.string_at(int(bits.ctypes.state_address), _MT19937_BYTES)
