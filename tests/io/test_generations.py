"""Generations: what a commit does in which order, what stays, and going back; on every backend that is there."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from medium import PlainBackend, RecordingBackend
from state_world import World, make_entry

from dsa.config import IOConfig
from dsa.errors import ConfigError, CorruptError, FormatError, MismatchError, UsageError
from dsa.io.backends.aio import AiofilesBackend
from dsa.io.backends.base import Backend
from dsa.io.backends.threads import ThreadsBackend
from dsa.io.directory import Directory
from dsa.io.generations import Generations
from dsa.io.manifest_file import discard, read_manifest


@pytest.fixture(params=["plain", "threads", "aiofiles"])
def backend(request):
    made: Backend
    if request.param == "plain":
        made = PlainBackend()
    else:
        made = {"threads": ThreadsBackend, "aiofiles": AiofilesBackend}[request.param](IOConfig())
    yield made
    made.shut_down(10.0)


@pytest.fixture
async def world(backend, tmp_path):
    made = await World.begin(backend, tmp_path / "adam")
    yield made
    made.end()


async def test_what_was_committed_is_loaded_and_went_on_from(world):
    await world.step("a", 0, 3)
    assert await world.commit() == 1
    await world.step("a", 3, 4)
    await world.step("b", 5)
    assert await world.commit() == 2
    await world.reopen()
    assert world.generations.current == 2
    assert world.tables["a"].step == 2
    assert world.tables["b"].step == 1
    await world.step("b", 5)
    assert await world.commit() == 3
    assert await world.holds(world.directory.path, world.backend) == (2, 3)


async def test_opening_changes_nothing_on_disk(world):
    await world.step("a", 1)
    await world.commit()
    files = {path: path.read_bytes() for path in world.directory.path.rglob("*") if path.is_file()}
    folders = [world.directory.path, world.directory.tables_path, world.directory.index_path]
    names = {path: path.stat().st_mtime_ns for path in [*files, *folders]}
    opened = await Generations.open(world.backend, world.directory)
    assert opened.current is None
    assert opened.manifest == world.generations.manifest
    await opened.load(1, "a", np.zeros(6, np.int64), np.zeros(6, np.uint32))
    assert {path: path.read_bytes() for path in world.directory.path.rglob("*") if path.is_file()} == files
    assert {path: path.stat().st_mtime_ns for path in names} == names


async def test_an_empty_or_unfinished_directory_has_no_manifest(backend, tmp_path):
    directory = Directory(tmp_path / "adam")
    directory.lock()
    directory.make_subdirectories()
    directory.new_manifest_path.write_bytes(b"half")
    directory.file("tables/007-old.log").write_bytes(b"old")
    generations = await Generations.open(backend, directory)
    assert generations.manifest is None
    assert generations.numbers() == ()
    assert len(generations.retained_segments("a")) == 0
    with pytest.raises(UsageError, match="no generation yet"):
        await generations.commit([], counted=True, keep=1)
    await generations.create([make_entry("a", 6, [])])
    assert [path.name for path in directory.own_files()] == ["000-a.log"]
    slots, checks = np.zeros(6, np.int32), np.ones(6, np.uint32)
    state = await generations.load(0, "a", slots, checks)
    assert (state.step, state.index_file, generations.current) == (0, None, 0)
    assert (slots == -1).all()
    assert not checks.any()
    with pytest.raises(UsageError, match="discard"):
        await generations.create([])
    directory.unlock()


async def test_nothing_is_written_without_the_lock(world):
    generations = world.generations
    world.directory.unlock()
    other = await Generations.open(world.backend, world.directory)
    other.go_back(0)
    empty = Generations(world.backend, world.directory, None)
    for call in (
        lambda: other.commit([], counted=True, keep=1),
        lambda: empty.create([]),
        generations.discard,
        lambda: discard(world.backend, world.directory),
    ):
        with pytest.raises(UsageError, match="not locked"):
            await call()
    world.directory.lock()
    assert generations.numbers() == (0,)
    assert await world.commit() == 1


# Order.


async def test_a_commit_follows_the_order_that_loses_nothing(tmp_path):
    backend = RecordingBackend(tmp_path / "adam")
    world = await World.begin(backend, tmp_path / "adam")
    for name in ("a", "b"):
        await world.step(name, 0, 1)
    await world.commit(keep=1)
    for name in ("a", "b"):
        await world.step(name, 0, 1)
    backend.log.clear()
    await world.commit(keep=1)
    assert backend.log == [
        ("sync", "tables/000-a.log"),
        ("sync", "tables/001-b.log"),
        ("write_whole", "index/000002-000-a.idx"),  # synced by the contract
        ("write_whole", "index/000002-001-b.idx"),
        ("sync_directory", "index"),
        ("write_whole", "manifest.json.tmp"),
        ("replace", "manifest.json"),
        ("sync_directory", "."),
        ("remove", "index/000001-000-a.idx"),
        ("remove", "index/000001-001-b.idx"),
    ]
    world.end()


async def test_a_creation_makes_all_names_durable_before_it_is_seen(tmp_path):
    backend = RecordingBackend(tmp_path / "new" / "adam")
    world = await World.begin(backend, tmp_path / "new" / "adam")
    before = backend.log[: backend.log.index(("write_whole", "manifest.json.tmp"))]
    for synced in ("tables", "index", ".", "..", "../.."):
        assert ("sync_directory", synced) in before
    assert backend.log[-2:] == [("replace", "manifest.json"), ("sync_directory", ".")]
    world.end()


async def test_the_log_of_a_new_table_is_durable_before_the_manifest_names_it(tmp_path):
    backend = RecordingBackend(tmp_path / "adam")
    world = await World.begin(backend, tmp_path / "adam")
    world.add_table("later")
    backend.log.clear()
    await world.commit()
    operations = ["sync tables/002-later.log", "sync_directory tables", "write_whole manifest.json.tmp"]
    assert [" ".join(step) for step in backend.log][:3] == operations
    await world.step("later", 2)
    await world.commit()
    await world.reopen()
    assert await world.holds(world.directory.path, backend) == (1, 2)
    world.end()


async def test_a_generation_from_before_a_table_does_not_have_it(world):
    await world.step("a", 0)
    await world.commit()
    world.add_table("later")
    await world.commit()
    with pytest.raises(MismatchError, match=r"generation 1 has the tables \['a', 'b'\], not 'later'"):
        await world.generations.load(1, "later", np.zeros(6, np.int32), np.zeros(6, np.uint32))


async def test_unchanged_tables_cost_nothing(world):
    await world.step("a", 0)
    await world.step("b", 0)
    await world.commit(keep=None)
    await world.step("a", 1)
    world.tables["b"].step += 1  # an empty gradient: the step counts, the index stays
    await world.commit(keep=None)
    manifest = world.generations.manifest
    first, second = manifest.generation(1), manifest.generation(2)
    assert second.state("b") == replace(first.state("b"), step=2, fingerprint=6)
    assert second.state("a").index_file != first.state("a").index_file
    assert len(world.directory.index_files()) == 3
    await world.generations.release(1)
    assert world.directory.index_files() == {"index/000001-001-b.idx", "index/000002-000-a.idx"}
    assert await world.holds(world.directory.path, world.backend) == (2,)


async def test_tables_that_the_program_no_longer_has_are_carried_on(world):
    await world.step("b", 2)
    await world.commit(keep=1)
    before = world.generations.manifest.generation(1).state("b")
    world.backend.close(world.tables.pop("b").file)
    await world.step("a", 1)
    await world.generations.commit([world.tables["a"].image()], counted=True, keep=1)
    assert world.generations.manifest.generation(2).state("b") == before
    assert world.generations.retained_segments("b").tolist() == [True]


# What is kept.


async def test_the_newest_counted_generations_stay(world):
    for _ in range(4):
        await world.step("a", 0)
        await world.commit(keep=2)
    assert world.generations.numbers() == (3, 4)
    await world.step("a", 0)
    await world.commit(keep=2, counted=False)
    assert world.generations.numbers() == (3, 4, 5)
    await world.step("a", 0)
    await world.commit(keep=2)
    assert world.generations.numbers() == (4, 6)  # 5 was not counted, and is not the newest any more
    for _ in range(3):
        await world.step("a", 0)
        await world.commit(keep=None)
    assert world.generations.numbers() == (4, 6, 7, 8, 9)
    await world.step("a", 0)
    await world.commit(keep=1)
    assert world.generations.numbers() == (10,)


async def test_an_uncounted_generation_whose_number_was_handed_out_counts(world):
    await world.step("a", 0)
    await world.commit(counted=False)
    world.generations.hand_out(1)
    await world.step("a", 0)
    await world.commit(keep=2)
    await world.reopen()
    assert world.generations.numbers() == (1, 2)
    assert [g.counted for g in world.generations.manifest.generations] == [True, True]


async def test_what_was_handed_out_is_written_down_at_the_end(world):
    before = world.directory.manifest_path.read_bytes()
    await world.generations.settle()
    world.generations.hand_out(0)
    assert world.directory.manifest_path.read_bytes() == before  # no I/O for a number that is there already
    await world.generations.settle()
    after = world.directory.manifest_path.read_bytes()
    world.generations.hand_out(0)
    await world.generations.settle()
    assert world.directory.manifest_path.read_bytes() == after
    await world.reopen()
    assert [g.counted for g in world.generations.manifest.generations] == [True]
    with pytest.raises(MismatchError, match="generation 3 is not there"):
        world.generations.hand_out(3)


async def test_retained_segments_follow_the_manifest_not_the_running_state(world):
    await world.step("a", 0, 1)
    await world.commit(keep=1)
    assert world.generations.retained_segments("a").tolist() == [True]
    await world.step("a", 0, 1)
    assert world.generations.retained_segments("a").tolist() == [True]
    await world.commit(keep=1)
    assert world.generations.retained_segments("a").tolist() == [False, True]
    await world.step("a", 0, 1)
    await world.commit(keep=2)
    assert world.generations.retained_segments("a").tolist() == [True, True]
    kept = world.generations.retained_segments("a")
    await world.reopen()
    np.testing.assert_array_equal(world.generations.retained_segments("a"), kept)
    await world.generations.release(2)
    assert world.generations.retained_segments("a").tolist() == [True, False]


async def test_going_back_abandons_later_ones_at_the_next_commit(world):
    for row in (0, 1, 2):
        await world.step("a", row)
        await world.commit(keep=None)
    await world.go_back(1)
    assert world.generations.numbers() == (0, 1, 2, 3)[1:]
    await world.go_back(3)
    await world.go_back(2)
    await world.step("b", 0)
    assert await world.commit(keep=None) == 4
    assert world.generations.numbers() == (1, 2, 4)
    with pytest.raises(MismatchError, match=r"generation 3 is not there, present are 1, 2, 4.*keep_generations"):
        world.generations.go_back(3)
    assert world.generations.current == 4
    assert await world.holds(world.directory.path, world.backend) == (1, 2, 4)


async def test_release_refuses_what_is_needed_or_absent(world):
    await world.step("a", 0)
    await world.commit()
    await world.step("a", 0)
    await world.commit()
    with pytest.raises(UsageError, match="running state descends"):
        await world.generations.release(2)
    with pytest.raises(MismatchError, match="generation 7 is not there"):
        await world.generations.release(7)
    await world.generations.release(1)
    fresh = await Generations.open(world.backend, world.directory)
    assert fresh.numbers() == (2,)
    with pytest.raises(UsageError, match="only one"):
        await fresh.release(2)


operations = st.one_of(
    st.tuples(st.just("step"), st.sampled_from("ab"), st.sets(st.integers(0, 5), min_size=1, max_size=4)),
    st.tuples(st.just("commit"), st.booleans(), st.sampled_from([1, 2, 3, None])),
    st.tuples(st.just("back"), st.integers(0, 9), st.none()),
    st.tuples(st.just("release"), st.integers(0, 9), st.none()),
    st.tuples(st.just("reopen"), st.none(), st.none()),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(operations, max_size=14))
def test_any_history_leaves_what_the_rules_say(tmp_path_factory, history):
    asyncio.run(live_through(tmp_path_factory.mktemp("any") / "adam", history))


async def live_through(path, history) -> None:
    """Free segments are overwritten all the time: only the generations' own references protect them."""
    world = await World.begin(PlainBackend(), path)
    present: list[tuple[int, bool]] = [(0, False)]
    current, following = 0, 1
    for what, first, second in history:
        numbers = [number for number, _ in present]
        if what == "step":
            await world.step(first, *second)
        elif what == "commit":
            await world.commit(counted=first, keep=second)
            counted = [one for one in present if one[1] and one[0] <= current]
            room = len(counted) if second is None else second - first
            present = [*counted[max(len(counted) - room, 0) :], (following, first)]
            current, following = following, following + 1
        elif what == "back":
            current = numbers[first % len(numbers)]
            await world.go_back(current)
        elif what == "release" and numbers[first % len(numbers)] != current:
            gone = numbers[first % len(numbers)]
            await world.generations.release(gone)
            present = [one for one in present if one[0] != gone]
        elif what == "reopen":
            await world.reopen()
            current = numbers[-1]
        for name in world.tables:
            await world.spoil_what_is_free(name)
        assert await world.holds(path, world.backend) == tuple(number for number, _ in present)
    world.end()


# Damage, other people's files, wrong calls.


async def test_a_damaged_index_spoils_its_generation_only_and_protects_its_segments(world, caplog):
    await world.step("a", 0, 1)
    await world.commit()
    await world.step("a", 0, 1)  # so only generation 1 refers to segment 0
    await world.commit()
    broken = world.directory.file("index/000001-000-a.idx")
    data = bytearray(broken.read_bytes())
    data[4096] ^= 1
    broken.write_bytes(data)
    with caplog.at_level(logging.WARNING, "dsa"):
        await world.reopen()
    assert f"generation 1 of table 'a' cannot be loaded: {broken}" in caplog.text
    assert world.generations.retained_segments("a").tolist() == [True, True]
    with pytest.raises(CorruptError, match="at byte 4096"):
        await world.generations.load(1, "a", np.zeros(6, np.int32), np.zeros(6, np.uint32))
    broken.unlink()
    await world.reopen()
    with pytest.raises(CorruptError, match="missing"):
        await world.generations.load(1, "a", np.zeros(6, np.int32), np.zeros(6, np.uint32))
    await world.generations.release(1)
    assert await world.holds(world.directory.path, world.backend) == (2,)


async def test_an_index_and_a_manifest_that_disagree_are_damage(world):
    await world.step("a", 0)
    await world.commit()
    generation = world.generations.manifest.generation(1)
    wrong = tuple(replace(state, n_segments=9) for state in generation.tables)
    world.generations.manifest = replace(world.generations.manifest, generations=(replace(generation, tables=wrong),))
    with pytest.raises(CorruptError, match="1 segments, the manifest says 9"):
        await world.generations.load(1, "a", np.zeros(6, np.int32), np.zeros(6, np.uint32))


async def test_a_damaged_or_foreign_manifest_is_refused_and_can_be_discarded(world):
    path = world.directory.manifest_path
    good = path.read_bytes()
    for data, error in ((good[:-4096], CorruptError), (good[:100], CorruptError), (b"{}", FormatError)):
        path.write_bytes(data)
        with pytest.raises(error, match=r"manifest\.json"):
            await Generations.open(world.backend, world.directory)
    (world.directory.path / "notes.txt").write_text("the user's")
    (world.directory.tables_path / "mine.log").write_text("the user's too")
    await discard(world.backend, world.directory)
    left = {path.name for path in world.directory.path.rglob("*") if path.is_file()}
    assert left == {"LOCK", "notes.txt", "mine.log"}
    assert await read_manifest(world.backend, world.directory) is None


async def test_discard_removes_the_manifest_first_and_a_new_creation_follows(tmp_path):
    backend = RecordingBackend(tmp_path / "adam")
    world = await World.begin(backend, tmp_path / "adam")
    await world.step("a", 0)
    await world.commit()
    uuid = world.generations.manifest.uuid
    entries = [table.entry for table in world.tables.values()]
    backend.log.clear()
    await world.generations.discard()
    assert backend.log[:2] == [("remove", "manifest.json"), ("sync_directory", ".")]
    assert {operation for operation, _ in backend.log[2:]} == {"remove"}
    assert world.generations.numbers() == ()
    await world.generations.create(entries)
    assert world.generations.manifest.uuid != uuid
    assert world.generations.numbers() == (0,)
    assert all(world.directory.file(entry.file).stat().st_size == 0 for entry in entries)
    world.end()


async def test_grown_tables_are_taken_and_others_refused(world):
    await world.step("a", 5)
    await world.commit()
    table = world.tables["a"]
    table.entry = replace(table.entry, shape=(9, 64))
    table.slots = np.concatenate([table.slots, np.full(3, -1, np.int32)])
    table.checks = np.concatenate([table.checks, np.zeros(3, np.uint32)])
    await world.step("a", 8)
    await world.commit(keep=1)
    await world.reopen()
    assert await world.holds(world.directory.path, world.backend) == (2,)
    image = world.tables["a"].image()
    for changed in ({"shape": (6, 64)}, {"shape": (9, 65)}, {"dtype": "float64"}, {"record_bytes": 1024}):
        with pytest.raises(MismatchError, match="in the manifest"):
            await world.generations.commit(
                [replace(image, entry=replace(image.entry, **changed))], counted=True, keep=1
            )


async def test_wrong_calls_touch_nothing(world):
    image = world.tables["a"].image()
    fresh = await Generations.open(world.backend, world.directory)
    with pytest.raises(UsageError, match="go_back"):
        await fresh.commit([image], counted=True, keep=1)
    with pytest.raises(ConfigError, match="at least 1"):
        await world.generations.commit([image], counted=True, keep=0)
    for wrong in (
        replace(image, slots=image.slots[:5]),
        replace(image, slots=image.slots.astype(np.int16)),
        replace(image, checks=image.checks.astype(np.int32)),
        replace(image, slots=np.zeros(12, np.int32)[::2]),
    ):
        with pytest.raises(ValueError, match="table 'a'"):
            await world.generations.commit([wrong], counted=True, keep=1)
    assert await world.commit() == 1


async def test_wide_slots_and_a_checkpoint_of_many_rows(backend, tmp_path):
    """8 bytes a row and a little; the arrays are int64 where slots need it."""
    world = await World.begin(backend, tmp_path / "adam", ("a", "b"), n_rows=1_000_000)
    wide = world.tables["b"]
    wide.slots = wide.slots.astype(np.int64)
    await world.step("a", 0, 999_999)
    await world.step("b", 7)
    before = backend.counters.write_bytes
    await world.commit()
    assert backend.counters.write_bytes - before <= 8.1 * 1_000_000 + 12.1 * 1_000_000
    await world.reopen()
    assert await world.holds(world.directory.path, backend) == (1,)
    world.end()
