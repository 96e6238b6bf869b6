"""Whether direct I/O is real is found out by transfers."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from dsa.io.backends import direct
from dsa.io.backends.base import File

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="direct I/O is used on Linux only")


@pytest.fixture
def real(tmp_path: Path) -> direct.DirectIO:
    found = direct.probe(tmp_path)
    if not found.works:
        pytest.skip(f"no direct I/O in the directory for tests: {found.reason}")
    return found


def test_probe_leaves_nothing_behind_and_gives_a_usable_alignment(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    found = direct.probe(tmp_path)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert found.reason
    assert found.alignment in ((512, 1024, 2048, 4096) if found.works else (1,))


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no /dev/shm")
def test_file_system_in_memory_is_found_out_though_it_takes_the_flag() -> None:
    found = direct.probe(Path("/dev/shm"))
    assert not found.works
    assert found.alignment == 1


def test_page_cache_is_seen(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.write(bytes(16 * 4096))
        file.flush()
        os.fsync(file.fileno())
        before = direct.cached_pages(file.fileno(), 16 * 4096)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        after = direct.cached_pages(file.fileno(), 16 * 4096)
    assert before == 16
    if not direct.probe(tmp_path).works:
        pytest.skip("this file system keeps files in the page cache")
    assert after == 0


@pytest.mark.parametrize(("told", "word"), [(0, "does no direct I/O"), (8192, "8192"), (1000, "1000")])
def test_what_statx_denies_is_not_used(
    real: direct.DirectIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: int, word: str
) -> None:
    monkeypatch.setattr(direct, "told_alignment", lambda fd: told)
    found = direct.probe(tmp_path)
    assert not found.works
    assert word in found.reason


def test_without_statx_the_smallest_alignment_that_moves_bytes_is_taken(
    real: direct.DirectIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "told_alignment", lambda fd: None)
    tried: list[int] = []

    def transfer(fd: int, alignment: int) -> None:
        tried.append(alignment)
        if alignment < 4096:
            raise OSError(22, "Invalid argument")
        real_transfer(fd, alignment)

    real_transfer = direct._transfer
    assert direct.probe(tmp_path).alignment == real.alignment
    monkeypatch.setattr(direct, "_transfer", transfer)
    found = direct.probe(tmp_path)
    assert (found.works, found.alignment, tried) == (True, 4096, [512, 4096])


def test_transfers_that_fail_decide_against_it(
    real: direct.DirectIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def transfer(fd: int, alignment: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(direct, "_transfer", transfer)
    found = direct.probe(tmp_path)
    assert not found.works
    assert "Input/output error" in found.reason


def test_bytes_that_come_back_wrong_are_a_failed_transfer(
    real: direct.DirectIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: sum(len(buffer) for buffer in buffers))
    assert not direct.probe(tmp_path).works


def test_directory_that_cannot_hold_a_file_says_so(tmp_path: Path) -> None:
    found = direct.probe(tmp_path / "missing")
    assert not found.works
    assert "no temporary file" in found.reason


def test_system_without_the_flag_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_O_DIRECT", 0)
    assert "no O_DIRECT" in direct.probe(tmp_path).reason


def test_files_are_turned_and_their_directory_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = direct.probe(tmp_path)
    probed: list[Path] = []

    def probe(directory: Path) -> direct.DirectIO:
        probed.append(directory)
        return found

    monkeypatch.setattr(direct, "probe", probe)
    files = direct.DirectFiles()
    for name in ("a", "b"):
        path = tmp_path / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            file = File(path, fd)
            files.turn(file)
            flag = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        finally:
            os.close(fd)
        assert flag == found.works
        assert file.alignment == found.alignment
    assert probed == [tmp_path.resolve()]


def test_file_that_refuses_the_flag_stays_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "probe", lambda directory: direct.DirectIO(True, 512, "said so"))
    ends = os.pipe()
    try:
        file = File(tmp_path / "file", ends[0])
        monkeypatch.setattr(direct, "_set_direct", _refuse)
        direct.DirectFiles().turn(file)
    finally:
        for fd in ends:
            os.close(fd)
    assert file.alignment == 1


def _refuse(fd: int) -> None:
    raise OSError(22, "Invalid argument")
