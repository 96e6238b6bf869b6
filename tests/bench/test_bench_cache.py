"""The policies that eviction is measured against, against plain models; and that a replay repeats itself."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench import cache, policies


@pytest.fixture
def trace() -> cache.Trace:
    return cache.draws("small", seed=1, n_rows=400, batch=20, exponent=0.9)


def counted(trace: cache.Trace) -> tuple[list[int], int]:
    return trace.rows.tolist(), int(trace.starts[trace.measured])


@pytest.mark.parametrize("n_frames", [30, 100, 400])
def test_lru_against_an_ordered_dictionary(trace: cache.Trace, n_frames: int) -> None:
    rows, first = counted(trace)
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for i, row in enumerate(rows):
        hits += row in held and i >= first
        held[row] = None
        held.move_to_end(row)
        if len(held) > n_frames:
            held.popitem(last=False)
    assert policies.lru(trace.rows, trace.starts, trace.measured, trace.n_rows, n_frames) == hits


@pytest.mark.parametrize("n_frames", [30, 100])
def test_sieve_against_a_list(trace: cache.Trace, n_frames: int) -> None:
    rows, first = counted(trace)
    queue: list[int] = []  # the oldest first
    marked: set[int] = set()
    hand = hits = 0
    for i, row in enumerate(rows):
        if row in queue:
            marked.add(row)
            hits += i >= first
            continue
        if len(queue) == n_frames:
            hand %= len(queue)
            while queue[hand] in marked:
                marked.remove(queue[hand])
                hand = (hand + 1) % len(queue)
            # What follows takes the place of what goes; a hand past the youngest starts at the oldest again.
            del queue[hand]
            if hand == len(queue):
                hand = 0
        queue.append(row)
    assert policies.sieve(trace.rows, trace.starts, trace.measured, trace.n_rows, n_frames) == hits


@pytest.mark.parametrize("n_frames", [30, 100])
def test_belady_against_the_whole_future(trace: cache.Trace, n_frames: int) -> None:
    rows, first = counted(trace)
    coming: dict[int, list[int]] = {}
    for i in reversed(range(len(rows))):
        coming.setdefault(rows[i], []).append(i)
    held: set[int] = set()
    hits = 0
    for i, row in enumerate(rows):
        coming[row].pop()
        hits += row in held and i >= first
        if row not in held and len(held) == n_frames:
            held.remove(max(held, key=lambda r: (coming[r][-1] if coming[r] else len(rows), r)))
        held.add(row)
    found = policies.next_batches(trace.rows, trace.starts, trace.n_rows)
    truth = (trace.frequencies, trace.phase_batches)
    common = (trace.rows, trace.starts, trace.measured, trace.n_rows, n_frames, found)
    assert policies.foreknown(*common, 1 << 31, *truth, False) == hits
    assert policies.foreknown(*common, 64, *truth, True) <= hits


def test_a_cache_for_all_rows_misses_only_what_is_new(trace: cache.Trace) -> None:
    rows, first = counted(trace)
    new = len(set(rows[first:]) - set(rows[:first]))
    hits = cache.replay(trace, trace.n_rows, 4)
    assert hits.pop("ideal LFU") == len(rows) - first
    assert set(hits.values()) == {len(rows) - first - new}


def test_hits_are_repeatable_and_in_order(trace: cache.Trace) -> None:
    hits = cache.replay(trace, 60, 4)
    assert hits == cache.replay(trace, 60, 4)
    assert hits["Belady"] >= hits["reference"] >= 0.95 * hits["DSA 64"]
    assert hits["DSA 64"] > hits["DSA 0"]


def test_the_graph_traces_hold_each_entity_as_often_as_it_occurs() -> None:
    made = cache.graph("fb15k-237", "fb15k237.npz", seed=0, triples=512)
    triples: NDArray[np.int32] = np.load(cache.DATA / "fb15k237.npz")["train"]
    assert made.n_rows == 1 + triples[:, [0, 2]].max()
    first = made.rows[: made.starts[-(-len(triples) // 512)]]
    assert np.array_equal(np.unique(first), np.unique(triples[:, [0, 2]]))
    assert made.frequencies.sum() == pytest.approx(1)


def test_the_command_writes_hits_and_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "cache.json"
    monkeypatch.setattr("sys.argv", ["cache", "--quick", "--rows", "600", "--trace", "scan", "--json", str(out)])
    cache.main()
    written = json.loads(out.read_text())
    assert [result["frames"] for result in written["results"]] == [30, 150]
    assert set(written["ratios"]) == {"none_vs_best", "known64_vs_reference"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--size", "0"], "--size is a share of the rows"),
        (["--size", "1.5"], "--size is a share of the rows"),
        (["--size", "nan"], "--size is a share of the rows"),
        (["--size", "0.001", "--trace", "uniform"], "--size 0.001: 20 frames do not hold a batch of 'uniform'"),
        (["--rows", "0"], "--rows must be at least 122"),
        (["--rows", "-5"], "--rows must be at least 122"),
        (["--trace", "no such trace"], "no trace is called no such trace"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    given: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.cache", "--quick", *given])
    with pytest.raises(SystemExit, match="2"):
        cache.main()
    assert says in capsys.readouterr().err
