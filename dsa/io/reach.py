"""How many batches ahead are held: as few as hide the reads, for a frame held early is one less for the cache. Pure."""

from __future__ import annotations

MOST = 64
_CALM_STEPS = 32
_SHARE = 0.03
"""Of the time between two steps: more than this spent waiting, and as much idle before, calls for a longer reach."""


class Reach:
    """The number of batches held beyond the one being stepped.

    Doubled when a step had to wait for its rows, and a longer reach may have saved that: because there had been time to
    bring them in, or because more reads at once go faster and the frames they take are few. One less after a run of
    steps without that. So it settles at about the time that a batch's reads take, in steps, and stays short where the
    disk has no time to spare and the cache no room.

    Args:
        fixed: this many, always; None: sized by itself.
    """

    def __init__(self, fixed: int | None) -> None:
        self.used_up = False  # since the last step a batch was left for later only because it is not within reach
        self.cheap = False  # and what was held then was a small part of the cache
        self._fixed = fixed
        self._batches = 2
        self._calm = 0
        self._seen = (0.0, 0.0, 0.0)

    @property
    def batches(self) -> int:
        """Batches to hold."""
        return self._batches if self._fixed is None else self._fixed

    @property
    def sizes_itself(self) -> bool:
        """Whether nobody fixed it."""
        return self._fixed is None

    def stepped(self, now_s: float, *, waited_s: float, idle_s: float, announced: bool) -> None:
        """A step is over.

        Args:
            now_s: the time, on any clock.
            waited_s: how long steps have waited for rows so far, all together.
            idle_s: how long nothing was being brought in so far.
            announced: whether something had been announced for the step; what it waited for says nothing otherwise.
        """
        between_s, waited_here_s, idle_here_s = (
            now - before for now, before in zip((now_s, waited_s, idle_s), self._seen, strict=True)
        )
        self._seen = now_s, waited_s, idle_s
        used_up, cheap = self.used_up, self.cheap
        self.used_up = self.cheap = False
        if not announced:
            return
        least_s = _SHARE * between_s
        if used_up and waited_here_s > least_s and (cheap or idle_here_s > least_s):
            self._batches = min(2 * self._batches, MOST)
            self._calm = 0
        elif (calm := self._calm + 1) < _CALM_STEPS:
            self._calm = calm
        else:
            self._batches = max(1, self._batches - 1)
            self._calm = 0
