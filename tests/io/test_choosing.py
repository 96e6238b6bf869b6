"""The compiled choice of frames against the same in plain Python: which, in which order, where the hand then is."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.io.choosing import NOBODY, choose
from dsa.io.frame_passes import BOOKS

FRAMES = st.integers(1, 5000)


def key_of(code: int, due: int, oldest: int, span: int) -> int:
    return 255 + span - (due - oldest) if 0 <= due - oldest < span and due >= 0 else code


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    n_frames=FRAMES,
    share=st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]),
    looks=st.sampled_from([1.0, 0.5, 0.1]),
    count=st.integers(1, 300),
    with_pins=st.booleans(),
    table=st.sampled_from([-1, 0, 1]),
    span=st.sampled_from([0, 1, 9]),
    seed=st.integers(0, 10**6),
)
def test_the_best_frames_come_in_order_and_the_hand_stops_where_there_are_enough(
    n_frames: int, share: float, looks: float, count: int, with_pins: bool, table: int, span: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    books = np.zeros(n_frames, BOOKS)
    flags, pins, table_of = books["flags"], books["pins"], books["table_of"]
    flags[:] = np.where(random.random(n_frames) < share, 1, random.integers(2, 4, n_frames))
    pins[:] = random.random(n_frames) < 0.2
    table_of[:] = random.integers(0, 2, n_frames)
    code = random.integers(0, 256, n_frames).astype(np.uint8)
    due = random.integers(95, 112, n_frames).astype(np.int32)
    due[random.random(n_frames) < 0.3] = -1
    hand = int(random.integers(0, n_frames))
    look = int(looks * n_frames)

    free, frame, seen = [], hand, 0
    while seen < n_frames and (seen < max(look, count) or len(free) < count):
        pinned = with_pins and pins[frame] > 0
        if flags[frame] & 3 == 1 and not pinned and table in (-1, table_of[frame]):
            free.append(frame)
        frame, seen = (frame + 1) % n_frames, seen + 1
    ranked = sorted(free, key=lambda one: key_of(int(code[one]), int(due[one]), 100, span))

    nobody, anywhere = np.zeros(0, np.int32), np.zeros(0, np.int16)
    tables = table_of if table >= 0 else anywhere
    args = (flags, 3, 1, pins if with_pins else nobody, tables, table, code, due, 100, span)
    chosen, at, last = choose(count, look, hand, *args)
    assert chosen.tolist() == ranked[:count]  # equal ones in the order in which they were met
    assert at == frame
    worst = key_of(int(code[ranked[count - 1]]), int(due[ranked[count - 1]]), 100, span) if len(free) >= count else None
    assert last == (NOBODY if worst is None else worst)
