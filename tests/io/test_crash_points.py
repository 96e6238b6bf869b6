"""Every point of a commit: killed there, failing there, without power there. The old generation or the new, no mix."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from medium import FailingBackend, PlainBackend, PowerLoss
from state_world import World

from dsa.errors import DeviceError, StateFileError, UsageError
from dsa.io.directory import Directory
from dsa.io.generations import Generations


class Losses:
    """Collects what a loss of power could leave at each point, with what may be found there, to be looked at later."""

    def __init__(self, root: Path, ignored: frozenset[tuple[str, str]] = frozenset()) -> None:
        root.mkdir()
        self.medium = PowerLoss(root=root, ignored=ignored, observe=self._observe)
        self.newest: tuple[int | None, ...] = (None,)
        self.points = 0
        self.states: dict[tuple[frozenset[tuple[str, bytes | None]], tuple[int | None, ...]], None] = {}

    def _observe(self) -> None:
        self.points += 1
        for state in self.medium.survivors():
            self.states[frozenset(state.items()), self.newest] = None

    async def check(self, world: World, scratch: Path) -> set[int | None]:
        """Open every state; the newest generations that were found. AssertionError or StateFileError: a mix."""
        found = set()
        for state, newest in self.states:
            lay_out(state, scratch)
            numbers = await world.holds(scratch, PlainBackend())
            last = numbers[-1] if numbers else None
            assert last in newest, f"generation {last} is the newest, not one of {newest}"
            found.add(last)
        return found


def lay_out(state: frozenset[tuple[str, bytes | None]], path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, data in sorted(state, key=lambda item: item[0]):
        if data is None:
            (path / name).mkdir()
        else:
            (path / name).write_bytes(data)


async def training(losses: Losses) -> World:
    """Creation, and three commits of which each gives up the one before; what is free is overwritten at once."""
    losses.newest = (None, 0)
    world = await World.begin(losses.medium, losses.medium.root)
    losses.newest = (0,)
    for number, rows in ((1, (0, 1, 2)), (2, (2, 3)), (3, (0, 1, 2, 3))):
        await world.step("a", *rows)
        if number != 2:
            await world.step("b", 5)
        if number == 2:
            world.add_table("c")
            await world.step("c", 4)
        losses.newest = (number - 1, number)
        assert await world.commit(keep=1) == number
        losses.newest = (number,)
        for name in world.tables:
            await world.spoil_what_is_free(name)
    world.end()
    return world


async def test_power_lost_at_any_point_leaves_the_old_or_the_new_generation(tmp_path):
    losses = Losses(tmp_path / "adam")
    world = await training(losses)
    assert await losses.check(world, tmp_path / "after") == {None, 0, 1, 2, 3}
    assert losses.points > 60
    assert len(losses.states) > 200


NEEDED = [
    ("sync", "tables/000-a.log"),
    ("sync", "index/000002-000-a.idx"),
    ("sync", "tables/002-c.log"),
    ("sync", "manifest.json.tmp"),
    ("sync_directory", "tables"),
    ("sync_directory", "index"),
    ("sync_directory", "."),
]


@pytest.mark.parametrize("ignored", NEEDED, ids=lambda pair: " ".join(pair))
async def test_each_sync_is_needed(tmp_path, ignored):
    """A medium that promises one of them falsely loses something, so the test above would see it missing."""
    losses = Losses(tmp_path / "adam", frozenset([ignored]))
    world = await training(losses)
    with pytest.raises((AssertionError, StateFileError, DeviceError, FileNotFoundError)):
        await losses.check(world, tmp_path / "after")


async def killed_before_the_last_sync(losses: Losses) -> World:
    """A process dies between the rename and the directory's sync; the next one goes on from what it sees."""
    medium = losses.medium
    losses.newest = (None, 0)
    world = await World.begin(medium, medium.root)
    await world.step("a", 0, 1)
    losses.newest = (None, 0, 1)
    await world.commit(keep=1)
    await world.step("a", 0, 1)

    def die() -> None:
        if any("manifest.json" in changes for _, changes in medium.pending):
            raise KeyboardInterrupt

    medium.observe = die
    with pytest.raises(KeyboardInterrupt):
        await world.commit(keep=1)
    medium.observe = losses._observe
    losses.newest = (1, 2)
    return world


async def test_what_a_killed_process_left_is_made_durable_before_anything_is_reused(tmp_path):
    losses = Losses(tmp_path / "adam")
    world = await killed_before_the_last_sync(losses)
    await world.reopen()
    assert world.generations.current == 2
    losses.newest = (2,)
    await world.spoil_what_is_free("a")
    world.end()
    assert await losses.check(world, tmp_path / "after") == {None, 0, 1, 2}


async def test_without_that_sync_the_old_generation_would_come_back_spoiled(tmp_path):
    losses = Losses(tmp_path / "adam")
    world = await killed_before_the_last_sync(losses)
    losses.medium.ignored = frozenset([("sync_directory", ".")])
    await world.reopen()
    await world.spoil_what_is_free("a")
    world.end()
    with pytest.raises(AssertionError):
        await losses.check(world, tmp_path / "after")


async def two_commits(world: World) -> None:
    await world.step("a", 0, 1, 2)
    await world.step("b", 4)
    await world.commit(keep=1)
    await world.step("a", 2, 3)
    world.add_table("new")
    await world.step("new", 1)
    await world.commit(keep=1)


@pytest.mark.parametrize("late", [False, True])
async def test_a_failure_at_any_operation_leaves_a_state_to_go_on_from(tmp_path, late):
    """Each operation in turn fails, before it or within it; then what is there is verified, and trained on."""
    for at in range(1000):
        path = tmp_path / str(at)
        world = await World.begin(PlainBackend(), path)
        failing = FailingBackend(-2, late=late)
        await world.reopen(backend=failing)
        failing.left = at
        try:
            await two_commits(world)
        except DeviceError:
            failing.left = -2  # the device works again, the object knows that it may not go on
            if world.generations._failure is not None:
                with pytest.raises(UsageError, match="an earlier write"):
                    await world.commit(keep=1)
        before = world.generations.numbers()
        for number in before:  # it still reads
            for name, (slots, checks, _) in world.expected[number].items():
                table = world.tables[name]
                await world.generations.load(number, name, table.slots, table.checks)
                assert (table.slots == slots).all()
                assert (table.checks == checks).all()
        numbers = await world.holds(path, PlainBackend())
        assert numbers[-1] in (before[-1], before[-1] + 1)
        await world.reopen(backend=PlainBackend())
        await world.step("b", 0)
        newest = await world.commit(keep=1)
        assert await world.holds(path, PlainBackend()) == (newest,)
        referred = world.generations.manifest.index_files()
        assert world.directory.index_files() == referred  # nothing is left lying about
        world.end()
        if failing.left >= 0:
            break
    assert 15 < at < 999


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", ["create", "discard"])
async def test_a_creation_or_discard_cut_short_is_begun_anew(tmp_path, late, what):
    outcomes = set()
    for at in range(1000):
        path = tmp_path / str(at)
        world = await World.begin(PlainBackend(), path)
        await world.step("a", 1)
        await world.commit()
        if what == "create":
            await world.generations.discard()
        entries = [table.entry for table in world.tables.values()]
        world.end()
        failing = FailingBackend(at, late=late)
        directory = Directory(path)
        directory.lock()
        generations = await Generations.open(PlainBackend(), directory)
        generations.backend = failing
        failed = False
        try:
            if what == "discard":
                await generations.discard()
            else:
                await generations.create(entries)
        except DeviceError:
            failed = True
        directory.unlock()
        directory.lock()
        after = await Generations.open(PlainBackend(), directory)
        outcomes.add(after.numbers())
        if after.manifest is None:
            await after.create(entries)
            assert after.numbers() == (0,)
        directory.unlock()
        if not failed:
            break
    assert 3 < at < 999
    whole = (0,) if what == "create" else (1,)
    assert outcomes == ({()} if what == "discard" and late else {(), whole})
