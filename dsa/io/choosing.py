"""The choice among an arena's frames: the first ones of a run behind a hand, by what is known of each. Pure.

Which frames qualify, and in which order they come, nobody can predict, and a processor that guesses wrong loses more
time than all the rest takes. So no branch in these loops depends on a single frame.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel

NOBODY = 1 << 40
"""Beyond the key of every frame."""

SEQUENCE_BITS = 0x7FFFFFFF
"""The bits of a batch's number that a frame's next use keeps."""

_STRETCH = 1 << 10  # frames looked at together where the first look was not enough


@kernel
def _candidates(
    first: int,
    stop: int,
    flags: NDArray[np.uint8],
    mask: int,
    wanted: int,
    pins: NDArray[np.int32],
    table_of: NDArray[np.int16],
    table: int,
    found: int,
    candidates: NDArray[np.int32],
) -> int:
    """Append the frames `first` to `stop` that qualify for `choose` to the `found` candidates; how many there are then.

    `candidates` has room for one more: every frame is put there, and one that does not qualify is overwritten.
    """
    if len(pins) > 0 and table >= 0:
        for frame in range(first, stop):
            candidates[found] = frame
            free = np.int64((flags[frame] & mask) == wanted) & np.int64(pins[frame] == 0)
            found += free & np.int64(table_of[frame] == table)
    elif len(pins) > 0:
        for frame in range(first, stop):
            candidates[found] = frame
            found += np.int64((flags[frame] & mask) == wanted) & np.int64(pins[frame] == 0)
    elif table >= 0:
        for frame in range(first, stop):
            candidates[found] = frame
            found += np.int64((flags[frame] & mask) == wanted) & np.int64(table_of[frame] == table)
    else:
        for frame in range(first, stop):
            candidates[found] = frame
            found += np.int64((flags[frame] & mask) == wanted)
    return found


@kernel
def choose(
    count: int,
    look: int,
    hand: int,
    flags: NDArray[np.uint8],
    mask: int,
    wanted: int,
    pins: NDArray[np.int32],
    table_of: NDArray[np.int16],
    table: int,
    frame_code: NDArray[np.uint8],
    frame_due: NDArray[np.int32],
    oldest: int,
    span: int,
) -> tuple[NDArray[np.int32], int, int]:
    """The best `count` of the frames behind the hand: `look` of them, and as many more as it takes.

    Also where the hand is then, and the key of the last one; NOBODY where there are fewer.

    Only frames with the `wanted` of the flags in `mask`, without a pin (where `pins` are given), and of `table` (where
    it is not -1).

    The key of a frame: its byte (0 to 255) where no known batch is due; else 256 and more, least for the latest due.
    """
    n_frames = len(flags)
    look = min(max(look, count), n_frames)
    candidates = np.empty(look + 1, np.int32)
    state = (flags, mask, wanted, pins, table_of, table)
    found = _candidates(hand, min(hand + look, n_frames), *state, 0, candidates)
    found = _candidates(0, hand + look - n_frames, *state, found, candidates)
    frame = (hand + look) % n_frames
    seen = look
    while seen < n_frames and found < count:
        stop = min(frame + min(_STRETCH, n_frames - seen), n_frames, frame + look - found)
        found = _candidates(frame, stop, *state, found, candidates)
        seen += stop - frame
        frame = stop % n_frames
        if found >= count:
            found = count
            frame = (candidates[count - 1] + 1) % n_frames
    tally = np.zeros(256 + span, np.int64)
    keys = np.empty(found, np.int32)
    for i in range(found):
        due = np.int64(frame_due[candidates[i]])
        distance = (due - oldest) & SEQUENCE_BITS
        known = np.int64(due >= 0) & np.int64(distance < span)
        code = np.int64(frame_code[candidates[i]])
        key = code + known * (255 + span - distance - code)
        tally[key] += 1
        keys[i] = key
    # From here on tally[key] is the place of the next frame with that key.
    place = 0
    last = NOBODY
    for key in range(len(tally)):
        here = tally[key]
        if place < count <= place + here:
            last = key
        tally[key] = place
        place += here
    chosen = np.empty(found, np.int32)
    for i in range(found):
        place = tally[keys[i]]
        chosen[place] = candidates[i]
        tally[keys[i]] = place + 1
    return chosen[:count].copy(), frame, last
