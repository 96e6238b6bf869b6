"""How many batches ahead are held: as few as hide the reads, for a frame held early is one less for the cache. Pure."""

from __future__ import annotations

MOST = 64
_CALM_STEPS = 32


class Reach:
    """The number of batches held beyond the one being stepped.

    Doubled when a step had to wait for its rows, one less after a run of steps that had not: so it settles at about the
    time that a batch's reads take, in steps.

    Args:
        fixed: this many, always; None: sized by itself.
    """

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self._batches = 2
        self._calm = 0

    @property
    def batches(self) -> int:
        """Batches to hold."""
        return self._batches if self._fixed is None else self._fixed

    @property
    def sizes_itself(self) -> bool:
        """Whether nobody fixed it."""
        return self._fixed is None

    def stepped(self, *, waited: bool) -> None:
        """A step that had been announced has its rows; whether it had to wait for them."""
        if waited:
            self._batches = min(2 * self._batches, MOST)
            self._calm = 0
        elif (calm := self._calm + 1) < _CALM_STEPS:
            self._calm = calm
        else:
            self._batches = max(1, self._batches - 1)
            self._calm = 0
