"""Every check and every reference of every generation of a state directory, and a list of all that is wrong."""

from __future__ import annotations

import os
import time

from dsa.errors import DeviceError, StateFileError
from dsa.io.findings import Damage, Verification, Work, file_bytes
from dsa.io.manifest import Manifest
from dsa.io.manifest_file import read_manifest
from dsa.io.reading import Opened, Progress, open_directory, run
from dsa.io.table_checks import TableCheck


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Verification:
    """Check everything that any generation of a state directory refers to; nothing but the lock's text is changed.

    Args:
        path: the directory; it is locked meanwhile, unless it is in use.
        progress: called now and then with bytes done and bytes in all.

    Raises:
        ConfigError, FormatError: it is no state directory.
        DeviceError: it cannot be read at all. (A file in it that cannot be read is damage.)
    """
    return run(_verify(path, progress))


async def _verify(path: str | os.PathLike[str], progress: Progress | None) -> Verification:
    began = time.perf_counter()
    async with open_directory(path) as opened:
        found = Verification(str(opened.directory.path), not_locked=opened.not_locked)
        manifest = await _manifest(opened, found)
        if manifest is not None:
            found.uuid = manifest.uuid
            found.generations = tuple(generation.number for generation in manifest.generations)
            work = Work(progress, _total_bytes(opened, manifest))
            for entry in manifest.tables:
                await TableCheck(opened, manifest, entry, found, work).verify()
            _note_strays(opened, manifest, found)
            if opened.in_use:
                await _forget_given_up(opened, manifest, found)
            work.end()
    found.seconds = time.perf_counter() - began
    return found


async def _manifest(opened: Opened, found: Verification) -> Manifest | None:
    path = opened.directory.manifest_path
    try:
        manifest = await read_manifest(opened.backend, opened.directory)
    except (StateFileError, DeviceError) as error:
        found.damage.append(Damage("manifest", str(path), str(error)))
        found.notes.append("without the manifest nothing refers to the other files: they were not checked")
        return None
    if manifest is None:
        lost = [file for file in opened.directory.own_files() if file.suffix in (".log", ".idx") and file_bytes(file)]
        if lost:
            text = (
                f"{path}: the manifest is missing, though there is {lost[0]}: it was removed, or a discard was cut "
                "short; nothing can be loaded"
            )
            found.damage.append(Damage("manifest", str(path), text))
        else:
            found.notes.append("no manifest and no data: a creation was cut short, the directory counts as empty")
    return manifest


def _total_bytes(opened: Opened, manifest: Manifest) -> int:
    files = [*manifest.index_files(), *(entry.file for entry in manifest.tables)]
    return sum(file_bytes(opened.directory.file(file)) for file in files)


def _note_strays(opened: Opened, manifest: Manifest, found: Verification) -> None:
    known = {opened.directory.file(file) for file in manifest.index_files()}
    known |= {opened.directory.file(entry.file) for entry in manifest.tables}
    for path in opened.directory.own_files():
        if path not in known and not opened.in_use:
            found.notes.append(f"{path} belongs to no generation; it is left from a commit that was cut short")


async def _forget_given_up(opened: Opened, manifest: Manifest, found: Verification) -> None:
    """Drop what was found about generations that the owner gave up meanwhile: he may have written over them."""
    found.notes.append(
        f"{found.not_locked}: what its steps have changed since its last checkpoint is in its memory and was not "
        "checked"
    )
    now = await read_manifest(opened.backend, opened.directory)
    present = {generation.number for generation in now.generations} if now is not None else set()
    given_up = set(found.generations) - present
    if given_up:
        found.notes.append(f"generations {sorted(given_up)} were given up meanwhile: what was found there is left out")
        found.damage = [one for one in found.damage if not one.generations or set(one.generations) - given_up]
        found.generations = tuple(number for number in found.generations if number in present)
    if present - {generation.number for generation in manifest.generations}:
        found.notes.append("generations that came meanwhile were not checked: run verify again")
