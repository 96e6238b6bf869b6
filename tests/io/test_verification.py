"""Whatever is flipped, cut off or missing is found, and no step ever reads a silently wrong number."""

from __future__ import annotations

import contextlib
import errno
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dsa import DiskSparseAdam, IOConfig
from dsa.config import IOConfig as Config
from dsa.errors import ConfigError, DeviceError, DsaError, FormatError, StateFileError
from dsa.io import reading, table_checks
from dsa.io.backends import ThreadsBackend
from dsa.io.findings import Verification
from dsa.io.indexfile import Header
from dsa.io.layout import read_header, table_identity, write_header
from dsa.io.manifest import decode, encode
from dsa.io.verification import verify

SEGMENT = 8192
NAMES = ("nodes", "other")


def parameters() -> dict[str, nn.Parameter]:
    return {"nodes": nn.Parameter(torch.zeros(300, 6)), "other": nn.Parameter(torch.zeros(9, 2, dtype=torch.float64))}


def optimizer(directory: Path, params: dict[str, nn.Parameter], **options: Any) -> DiskSparseAdam:
    return DiskSparseAdam(
        list(params.items()),
        lr=0.1,
        state_dir=directory,
        io=IOConfig(segment_bytes=SEGMENT),
        backend="threads",
        kernel="reference",
        **options,
    )


def take_steps(opt: DiskSparseAdam, params: dict[str, nn.Parameter], seed: int, steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params.values():
            rows = torch.randperm(len(param) - 3, generator=generator)[: max(len(param) // 4, 1)]
            values = torch.randn(len(rows), *param.shape[1:], generator=generator, dtype=param.dtype)
            param.grad = torch.sparse_coo_tensor(rows[None], values, param.shape, check_invariants=False)
        opt.step()


def all_moments(opt: DiskSparseAdam, params: dict[str, nn.Parameter]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: opt.moments(name, list(range(len(param)))) for name, param in params.items()}


@dataclass
class State:
    """A state directory with generations 1 and 2, and the moments and weights of the second."""

    path: Path
    expected: dict[str, dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters as they were at generation 2."""
        return {name: nn.Parameter(values.clone()) for name, values in self.weights.items()}

    def manifest(self) -> Any:
        return decode(self.path.joinpath("manifest.json").read_bytes(), self.path)

    def index(self, generation: int, table: int = 0) -> tuple[Path, Any, Any]:
        """A table's index file, its slots and its checks."""
        manifest = self.manifest()
        entry = manifest.tables[table]
        state = manifest.generation(generation).state(entry.name)

        async def load() -> tuple[Any, Any]:
            async with reading.open_directory(self.path, lock=False) as opened:
                return await reading.load_index(opened, manifest, entry, state)

        return (self.path / state.index_file, *reading.run(load()))

    def log(self, table: int = 0) -> Path:
        return self.path / str(self.manifest().tables[table].file)

    def offset_of(self, row: int, generation: int, table: int = 0) -> int:
        """Where the row's record of a generation begins in the log."""
        slots = self.index(generation, table)[1]
        layout = reading.log_layout(self.manifest().tables[table])
        return int(layout.offsets(np.array([slots[row]], np.int64))[0])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> State:
    directory = tmp_path_factory.mktemp("state") / "dir"
    params = parameters()
    with optimizer(directory, params) as opt:
        take_steps(opt, params, 1)
        opt.checkpoint()
        take_steps(opt, params, 2)
        opt.checkpoint()
        expected = all_moments(opt, params)
    return State(directory, expected, {name: param.detach() for name, param in params.items()})


@pytest.fixture
def state(original: State, tmp_path: Path) -> State:
    """A copy of it, to be damaged."""
    shutil.copytree(original.path, tmp_path / "dir")
    return State(tmp_path / "dir", original.expected, original.weights)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def refused_or_right(state: State) -> bool:
    """Read everything through the optimizer: True where it raised; else every number must be the right one."""
    params = state.parameters()
    opt = None
    try:
        opt = optimizer(state.path, params, existing="resume")
        found = all_moments(opt, params)
    except (StateFileError, DeviceError):
        return True
    finally:
        if opt is not None:
            with contextlib.suppress(DsaError):
                opt.close()
    for name, moments in state.expected.items():
        for key, values in moments.items():
            assert torch.equal(found[name][key], values), f"{key} of {name} is silently wrong"
    return False


def kinds(found: Verification) -> set[str]:
    return {damage.kind for damage in found.damage}


def places(found: Verification) -> list[tuple[str, int, int, tuple[int, ...]]]:
    """Path, row, offset and generations of every damaged record."""
    each = [one for damage in found.damage for one in damage.each() if one["kind"] == "record"]
    return [(one["path"], one["row"], one["offset_bytes"], tuple(one["generations"])) for one in each]


def records_of(state: State) -> int:
    """Records of all generations and tables, each once for every generation that has it."""
    return sum(int((state.index(g, t)[1] >= 0).sum()) for g in (1, 2) for t in (0, 1))


def test_an_undamaged_directory_is_clean(original: State) -> None:
    found = verify(original.path)
    live = records_of(original)
    assert found.clean
    assert found.generations == (1, 2)
    assert found.record_checks == live > 0
    assert found.notes == []
    assert found.not_locked is None


def test_an_undamaged_directory_is_read_right(original: State, state: State) -> None:
    assert not refused_or_right(state)


# Flips: the manifest.

MANIFEST_REGIONS: dict[str, Callable[[bytes], int]] = {
    "signature": lambda data: 5,
    "version": lambda data: data.index(b'"format_version":') + 17,
    "check": lambda data: data.index(b'"check":"') + 9,
    "uuid": lambda data: data.index(b'"uuid":"') + 8,
    "next number": lambda data: data.index(b'"next_number":') + 14,
    "a table's name": lambda data: data.index(b'"name":"nodes') + 8,
    "an index check": lambda data: data.index(b'"index_check":') + 14,
    "a step": lambda data: data.index(b'"step":') + 7,
    "brace": lambda data: data.rindex(b"}"),
    "padding": lambda data: len(data) - 100,
    "last byte": lambda data: len(data) - 1,
}


@pytest.mark.parametrize("region", MANIFEST_REGIONS)
def test_a_flip_in_the_manifest_is_found(state: State, region: str) -> None:
    path = state.path / "manifest.json"
    flip(path, MANIFEST_REGIONS[region](path.read_bytes()))
    found = verify(state.path)
    assert kinds(found) == {"manifest"}
    assert str(path) in found.damage[0].text
    assert refused_or_right(state)


# Flips: an index file.

INDEX_HEADER = {
    "magic": 0,
    "version": 8,
    "bytes of a slot": 12,
    "uuid": 16,
    "generation": 32,
    "n_rows": 40,
    "n_segments": 48,
    "bytes of a chunk": 56,
    "n_chunks": 64,
    "hash of the name": 72,
    "check of the checks": 88,
    "zeros": 2000,
    "check": 4092,
}
INDEX_SECTIONS = [f"{part} {i}" for i in range(4) for part in ("first byte of", "padding of")]


def index_offset(region: str, header: Header) -> int:
    if region in INDEX_HEADER:
        return INDEX_HEADER[region]
    section = header.sections()[int(region[-1])]
    return section.offset if region.startswith("first") else section.end - 1


@pytest.mark.parametrize("region", [*INDEX_HEADER, *INDEX_SECTIONS])
def test_a_flip_in_an_index_is_found(state: State, region: str) -> None:
    manifest = state.manifest()
    path, slots, _ = state.index(2)
    n_segments = manifest.generation(2).state("nodes").n_segments
    header = Header(manifest.uuid, "nodes", 2, len(slots), slots.dtype.itemsize, n_segments)
    flip(path, index_offset(region, header))
    found = verify(state.path)
    assert kinds(found) == {"index"}
    assert {damage.generations for damage in found.damage} == {(2,)}
    assert all(str(path) in damage.text for damage in found.damage)
    # What could be judged by other generations and tables was.
    assert found.record_checks >= sum(int((state.index(g, t)[1] >= 0).sum()) for g, t in ((1, 0), (1, 1), (2, 1)))
    # Which segments are referred to is not needed to read: where that is lost, none is written over.
    assert refused_or_right(state) == (region not in ("first byte of 1", "padding of 1"))


def test_all_damaged_chunks_of_an_index_are_listed(state: State) -> None:
    manifest = state.manifest()
    path, slots, _ = state.index(2)
    n_segments = manifest.generation(2).state("nodes").n_segments
    sections = Header(manifest.uuid, "nodes", 2, len(slots), slots.dtype.itemsize, n_segments).sections()
    for section in sections[1:]:
        flip(path, section.offset)
    texts = [damage.text for damage in verify(state.path).damage]
    assert len(texts) == 3
    for section in sections[1:]:
        assert any(f"at byte {section.offset}," in text for text in texts)
    assert sum("rows 0 to 299 could not be checked" in text for text in texts) == 2


# Flips: a log.

SEGMENT_HEADER = {
    "magic": 0,
    "version": 8,
    "record bytes": 12,
    "slots": 16,
    "records": 20,
    "segment": 24,
    "table": 32,
    "bytes of a row": 40,
    "check": 44,
    "zeros": 50,
    "first row": 64,
    "padding": 4095,
}


@pytest.mark.parametrize("region", SEGMENT_HEADER)
def test_a_flip_in_a_segment_header_is_found(state: State, region: str) -> None:
    begin = state.offset_of(int(np.flatnonzero(state.index(2)[1] >= 0)[0]), 2) // SEGMENT * SEGMENT
    flip(state.log(), begin + SEGMENT_HEADER[region])
    found = verify(state.path)
    assert kinds(found) == {"segment"}
    assert f"segment {begin // SEGMENT} at byte {begin}" in found.damage[0].text
    assert [one["offset_bytes"] for damage in found.damage for one in damage.each()] == [begin]
    # Which rows are in the segment is then known from the index alone: their records are checked all the same.
    assert found.record_checks == records_of(state)
    assert not refused_or_right(state)


@pytest.mark.parametrize("byte", [0, 23, 24, 47])
def test_a_flip_in_a_record_is_found_and_never_read(state: State, byte: int) -> None:
    slots = state.index(2)[1]
    row = int(np.flatnonzero(slots >= 0)[7])
    offset = state.offset_of(row, 2)
    flip(state.log(), offset + byte)
    found = verify(state.path)
    in_both = state.index(1)[1][row] == slots[row]
    assert places(found) == [(str(state.log()), row, offset, (1, 2) if in_both else (2,))]
    assert kinds(found) == {"record"}
    assert refused_or_right(state)


def test_a_flip_in_a_record_of_an_older_generation_only_is_found_and_harms_only_that(state: State) -> None:
    old, new = state.index(1)[1], state.index(2)[1]
    row = int(np.flatnonzero((old >= 0) & (old != new))[0])
    offset = state.offset_of(row, 1)
    flip(state.log(), offset)
    assert places(verify(state.path)) == [(str(state.log()), row, offset, (1,))]
    assert not refused_or_right(state)


def test_a_flip_where_no_record_is_harms_nothing(state: State) -> None:
    row = int(np.flatnonzero(state.index(2)[1] >= 0)[0])
    end_of_segment = state.offset_of(row, 2) // SEGMENT * SEGMENT + SEGMENT - 1
    flip(state.log(), end_of_segment)
    assert verify(state.path).clean
    assert not refused_or_right(state)


def test_all_damage_is_listed(state: State) -> None:
    slots = state.index(2)[1]
    rows = np.flatnonzero(slots >= 0)[::5]
    offsets = [state.offset_of(int(row), 2) for row in rows]
    for offset in offsets:
        flip(state.log(), offset + 8)
    flip(state.log(1), state.offset_of(int(np.flatnonzero(state.index(2, 1)[1] >= 0)[0]), 2, 1))
    found = places(verify(state.path))
    assert len({place[:3] for place in found}) == len(rows) + 1
    assert {(row, offset) for path, row, offset, _ in found if path == str(state.log())} == set(
        zip(rows.tolist(), offsets, strict=True)
    )


def test_indexes_that_do_not_fit_the_memory_together_are_checked_one_after_the_other(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = int(np.flatnonzero(state.index(2)[1] >= 0)[3])
    flip(state.log(), state.offset_of(row, 2))
    together = verify(state.path)
    monkeypatch.setattr(table_checks, "INDEX_BYTES_AT_ONCE", 1)
    apart = verify(state.path)
    assert apart.record_checks == together.record_checks
    assert apart.bytes_read > together.bytes_read
    assert {place[1:3] for place in places(apart)} == {place[1:3] for place in places(together)}
    assert {g for place in places(apart) for g in place[3]} == {g for place in places(together) for g in place[3]}


# Files cut short, missing or in disorder.


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["manifest", "index", "log"])
def test_a_file_cut_short_is_found(state: State, kind: str, share: float) -> None:
    path = {"manifest": state.path / "manifest.json", "index": state.index(2)[0], "log": state.log()}[kind]
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    found = verify(state.path)
    if kind == "log":
        kept = int(len(data) * share) // SEGMENT * SEGMENT
        live = {state.offset_of(int(row), 2) for row in np.flatnonzero(state.index(2)[1] >= 0)}
        lost = {offset for offset in live if offset >= kept}
        assert {offset for _, _, offset, generations in places(found) if 2 in generations} == lost
        assert refused_or_right(state) == bool(lost)
    else:
        assert kinds(found) == {kind}
        assert refused_or_right(state)


@pytest.mark.parametrize("kind", ["manifest", "index", "log"])
def test_a_missing_file_is_found(state: State, kind: str) -> None:
    path = {"manifest": state.path / "manifest.json", "index": state.index(2)[0], "log": state.log()}[kind]
    path.unlink()
    found = verify(state.path)
    assert kinds(found) == {kind}
    assert str(path) in found.damage[0].text


def test_an_index_that_the_manifest_does_not_agree_with_is_found(state: State) -> None:
    manifest = state.manifest()
    newest = manifest.generation(2)
    states = tuple(replace(one, live_rows=one.live_rows + (one.table == "nodes")) for one in newest.tables)
    changed = replace(manifest, generations=(manifest.generation(1), replace(newest, tables=states)))
    state.path.joinpath("manifest.json").write_bytes(encode(changed))
    (damage,) = verify(state.path).damage
    assert damage.kind == "index"
    assert f"the manifest says {states[0].live_rows}" in damage.text


def test_a_header_that_names_other_rows_than_the_index_is_found(state: State) -> None:
    manifest = state.manifest()
    layout = reading.log_layout(manifest.tables[0])
    slots = state.index(2)[1]
    row = int(np.flatnonzero(slots >= 0)[0])
    segment = int(slots[row]) // layout.slots
    data = np.frombuffer(state.log().read_bytes(), np.uint8).copy()
    part = data[segment * SEGMENT : (segment + 1) * SEGMENT]
    identity = table_identity(manifest.uuid, "nodes")
    named = read_header(part, layout, segment, identity, state.log())
    named[int(slots[row]) % layout.slots] = 299  # a row that was never written
    write_header(part, layout, segment, identity, named)
    state.log().write_bytes(data.tobytes())
    (damage,) = verify(state.path).damage
    assert damage.kind == "segment"
    assert f"does not name the rows [{row}]" in damage.text


class _BadSector(ThreadsBackend):
    """Cannot read one byte of the log."""

    at = 0

    async def read(self, file: Any, extents: Any, buffer: Any, then: Any = None) -> None:
        if file.path.name.startswith("000-") and file.path.suffix == ".log":
            for offset, length in zip(extents.offsets, extents.lengths, strict=True):
                if offset <= self.at < offset + length:
                    raise DeviceError(errno.EIO, "read", file.path, int(offset), int(length))
        await super().read(file, extents, buffer, then)


def test_a_sector_that_cannot_be_read_hides_nothing_else(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = state.index(2)[1]
    rows = np.flatnonzero(slots >= 0)
    unreadable = state.offset_of(int(rows[0]), 2)
    elsewhere = next(r for r in rows.tolist() if state.offset_of(r, 2) // SEGMENT != unreadable // SEGMENT)
    flip(state.log(), state.offset_of(elsewhere, 2))
    monkeypatch.setattr(_BadSector, "at", unreadable)
    monkeypatch.setattr(reading, "open_backend", lambda name, config: _BadSector(Config()))
    found = verify(state.path)
    assert any(damage.kind == "segment" and "errno 5" in damage.text for damage in found.damage)
    lost = {row for row in rows.tolist() if state.offset_of(row, 2) // SEGMENT == unreadable // SEGMENT}
    assert {place[1] for place in places(found) if 2 in place[3]} == lost | {elsewhere}


# A directory in use, and what is no state directory.


def test_a_directory_in_use_is_verified_and_what_cannot_be_checked_is_said(state: State) -> None:
    params = state.parameters()
    with optimizer(state.path, params, existing="resume") as opt:
        take_steps(opt, params, 5)
        found = verify(state.path)
        assert found.clean
        assert found.generations == (1, 2)
        assert found.not_locked is not None
        assert any("was not checked" in note for note in found.notes)


def test_damage_is_found_in_a_directory_in_use(state: State) -> None:
    row = int(np.flatnonzero(state.index(2)[1] >= 0)[0])
    flip(state.log(), state.offset_of(row, 2))
    with optimizer(state.path, parameters()):
        assert {place[1] for place in places(verify(state.path))} == {row}


def test_what_its_owner_gives_up_meanwhile_is_no_damage(state: State) -> None:
    old, new = state.index(1)[1], state.index(2)[1]
    row = int(np.flatnonzero((old >= 0) & (old != new))[0])
    flip(state.log(), state.offset_of(row, 1))  # as if the owner had written over it
    params = state.parameters()
    with optimizer(state.path, params, existing="resume", keep_generations=2) as opt:
        take_steps(opt, params, 5)
        calls = []

        def give_up_generation_1(done: int, total: int) -> None:
            if not calls:
                calls.append(opt.checkpoint())

        found = verify(state.path, give_up_generation_1)
        assert calls == [3]
        assert found.clean
        assert found.generations == (2,)
        assert any("given up meanwhile" in note for note in found.notes)
        assert any("came meanwhile" in note for note in found.notes)


def test_progress_ends_at_the_whole(original: State) -> None:
    calls: list[tuple[int, int]] = []
    verify(original.path, lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_what_is_no_state_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        verify(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="it is empty"):
        verify(tmp_path / "empty")
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(FormatError, match="not a state directory"):
        verify(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "holiday.jpg"]
    assert list((tmp_path / "empty").iterdir()) == []


def test_an_unfinished_creation_is_no_damage(state: State) -> None:
    state.path.joinpath("manifest.json").unlink()
    for folder in ("tables", "index"):
        for path in (state.path / folder).iterdir():
            path.unlink()
    found = verify(state.path)
    assert found.clean
    assert any("creation was cut short" in note for note in found.notes)


def test_files_of_a_commit_cut_short_are_noted(state: State) -> None:
    stray = state.path / "index" / "000009-000-nodes.idx"
    stray.write_bytes(struct.pack("<Q", 1))
    found = verify(state.path)
    assert found.clean
    assert any(str(stray) in note for note in found.notes)
