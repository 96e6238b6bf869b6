"""Import and export of dense moments: no second copy in RAM; a full disk is an error with its place, never SIGBUS."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_disk import Mounts, fill
from parity_rig import contents
from torch import nn
from typer.testing import CliRunner

from dsa import DiskSparseAdam
from dsa.cli import app
from dsa.errors import DeviceError, UsageError
from dsa.io.whole_file import WholeFile

pytestmark = pytest.mark.usefixtures("one_thread")
N_ROWS, WIDTH = 20_000, 32  # two moments of 2.56 MB


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every 50th row was written."""
    path = tmp_path_factory.mktemp("exports") / "adam"
    param = nn.Parameter(torch.zeros(N_ROWS, WIDTH))
    rows = torch.arange(0, N_ROWS, 50)
    with DiskSparseAdam([("w", param)], state_dir=path) as opt:
        param.grad = torch.sparse_coo_tensor(rows[None], torch.ones(len(rows), WIDTH), param.shape)
        opt.step()
    return path


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounts]:
    mounts = Mounts(tmp_path)
    yield mounts
    mounts.end()


def command(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize(
    ("name", "mib", "what"),
    [
        ("x.pt", None, "taking room"),
        ("x.pt", 4, "taking room"),  # one moment fits
        ("x.pt", 8, "write"),  # both do, and not what torch.save makes of them
        ("x.safetensors", None, "write|making the file"),
    ],
)
def test_an_export_to_a_full_disk(mount: Mounts, state: Path, kind: str, name: str, mib: int | None, what: str) -> None:
    place = mount(kind, mib or 4)
    if mib is None:
        fill(place)
    before = sorted(place.iterdir())
    status, out, err = command("export", state, place / name, "--json")
    assert status == 2, err
    assert err.count("\n") == 1
    assert re.search(f"({what}) failed: .* .errno {errno.ENOSPC}.*{place}", err), err
    assert json.loads(out)["type"] == "DeviceError"
    assert sorted(place.iterdir()) == before, "no part of a file stays"


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize(("mib", "what"), [(None, "taking room|making"), (4, "taking room"), (8, "write")])
def test_export_state_dict_to_a_full_disk(mount: Mounts, state: Path, kind: str, mib: int | None, what: str) -> None:
    """Training goes on, and the next export is whole."""
    place = mount(kind, mib or 4)
    if mib is None:
        fill(place)
    before = sorted(place.iterdir())
    param = nn.Parameter(torch.zeros(N_ROWS, WIDTH))
    with DiskSparseAdam([("w", param)], state_dir=place.parent / "adam") as opt:
        rows = torch.arange(0, N_ROWS, 50)
        param.grad = torch.sparse_coo_tensor(rows[None], torch.ones(len(rows), WIDTH), param.shape)
        opt.step()
        with pytest.raises(DeviceError, match=f"({what}).* failed") as caught:
            opt.export_state_dict(place / "x.pt")
        assert caught.value.errno == errno.ENOSPC
        assert str(place) in str(caught.value.filename)
        assert sorted(place.iterdir()) == before
        opt.step()
        opt.export_state_dict(place.parent / "x.pt")
    assert torch.load(place.parent / "x.pt", weights_only=True)["state"][0]["step"] == 2


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_copy_to_a_full_disk(mount: Mounts, state: Path, tmp_path: Path, kind: str) -> None:
    place = mount(kind, 4)
    ballast = fill(place)
    before = contents(state)
    status, _, err = command("copy", state, place / "copy")
    assert status == 2, err
    assert err.count("\n") == 1
    assert f"errno {errno.ENOSPC}" in err
    assert str(place / "copy") in err
    assert contents(state) == before
    ballast.unlink()
    status, _, err = command("copy", state, place / "copy")
    assert status == 0, err
    assert command("verify", place / "copy")[0] == 0


def test_a_whole_file_takes_its_room_and_tells_the_first_failure(mount: Mounts) -> None:
    place = mount("tmpfs", 1)
    with WholeFile(place / "a") as file:
        file.reserve(500_000)
    assert os.stat(place / "a").st_blocks * 512 >= 500_000
    assert (place / "a").read_bytes() == bytes(500_000)

    def fail_and_fail_again() -> None:
        with WholeFile(place / "b") as file:
            file.write(b"abc")
            try:
                file.write(bytes(800_000))
            except DeviceError:
                raise RuntimeError("whatever came of it") from None

    with pytest.raises(DeviceError, match=r"write failed.*at byte 3, 800000 bytes"):
        fail_and_fail_again()
    with pytest.raises(DeviceError, match="errno 17"):
        WholeFile(place / "a")


class Calls:
    """The calls that make an export durable, in order, with what they are of; one kind of them can fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.found: list[tuple[str, Path]] = []
        self.fail = ("", 0)
        self._folder = folder
        for name in ("fsync", "fdatasync", "replace"):
            monkeypatch.setattr(os, name, self._noted(name, getattr(os, name)))

    def _noted(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def noted(first: Any, *target: Path) -> None:
            place = Path(target[0] if target else os.readlink(f"/proc/self/fd/{first}"))
            if place == self._folder or self._folder in place.parents:
                kind = "rename" if target else "sync of the directory" if place == self._folder else "sync"
                self.found.append((kind, place))
                if kind == self.fail[0]:
                    raise OSError(self.fail[1], os.strerror(self.fail[1]))
            call(first, *target)

        return noted


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    if sys.platform != "linux":
        pytest.skip("what a descriptor is of is found as Linux shows it")
    folder = tmp_path / "exports"
    folder.mkdir()
    return Calls(monkeypatch, folder)


def export_by(way: str, state: Path, file: Path) -> str:
    """Export by the optimizer's method or by the command; what failed, or nothing."""
    if way == "command":
        return command("export", state, file, "--overwrite")[2]
    param = nn.Parameter(torch.zeros(N_ROWS, WIDTH))
    with DiskSparseAdam([("w", param)], state_dir=state, existing="resume") as opt:
        try:
            opt.export_state_dict(file)
        except DeviceError as error:
            return str(error)
    return ""


WAYS = pytest.mark.parametrize(("way", "name"), [("method", "x.pt"), ("command", "x.pt"), ("command", "x.safetensors")])


@WAYS
def test_an_export_is_on_the_medium_before_it_has_its_name(
    tmp_path: Path, state: Path, calls: Calls, way: str, name: str
) -> None:
    folder = tmp_path / "exports"
    assert export_by(way, state, folder / name) == ""
    (synced, whole), renamed, named = calls.found
    assert (synced, whole.parent.parent) == ("sync", folder)
    assert renamed == ("rename", folder / name)
    assert named == ("sync of the directory", folder)
    assert list(folder.iterdir()) == [folder / name]


@WAYS
@pytest.mark.parametrize("failing", ["sync", "rename", "sync of the directory"])
def test_an_export_that_cannot_be_made_durable_says_so_and_leaves_no_part(
    tmp_path: Path, state: Path, calls: Calls, way: str, name: str, failing: str
) -> None:
    folder = tmp_path / "exports"
    (folder / name).write_bytes(b"the one before")
    calls.fail = (failing, errno.EIO)
    assert re.search(f"{failing}.* failed: .*errno {errno.EIO}.*{folder}", export_by(way, state, folder / name))
    assert list(folder.iterdir()) == [folder / name]
    assert ((folder / name).read_bytes() == b"the one before") == (failing != "sync of the directory")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_a_directory_takes_an_export(
    tmp_path: Path, state: Path, calls: Calls, number: int
) -> None:
    file = tmp_path / "exports" / "x.pt"
    calls.fail = ("sync of the directory", number)
    assert export_by("method", state, file) == ""
    assert calls.found[-1] == ("sync of the directory", file.parent)
    assert torch.load(file, weights_only=True)["state"][0]["step"] == 1


def test_an_export_to_a_directory_is_refused_at_once(tmp_path: Path, state: Path, calls: Calls) -> None:
    with pytest.raises(UsageError, match="exports is a directory"):
        export_by("method", state, tmp_path / "exports")
    assert calls.found == []


LIMITED = """
import gc, resource, sys, threading, torch
from pathlib import Path
from torch import nn
from typer.testing import CliRunner
from dsa import DiskSparseAdam
from dsa.cli import app

torch.set_num_threads(1)
threading.stack_size(1 << 18)  # a thread's stack counts whole
folder, way = Path(sys.argv[1]), sys.argv[2]
width = 32

def source():
    moment = torch.full((n_rows, width), 2.0)
    groups = torch.optim.SparseAdam([nn.Parameter(torch.zeros(1, 1))]).state_dict()["param_groups"]
    state = {0: {"step": 3, "exp_avg": moment, "exp_avg_sq": moment}}
    torch.save({"state": state, "param_groups": groups}, folder / "source.pt")
    return torch.load(folder / "source.pt", weights_only=True, mmap=True)

def export_by_command():
    result = CliRunner().invoke(app, ["export", str(folder / "s"), str(folder / f"{n_rows}{way}")])
    assert result.exit_code == 0, result.output

def private_bytes():
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmData")).split()[1]) * 1024

def limited(work):
    gc.collect()
    try:
        spare = moment_bytes + (8 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + moment_bytes, resource.RLIM_INFINITY))
        try:
            bytearray(spare)
        except MemoryError:
            pass
        else:
            raise SystemExit("the limit does not limit")
        work()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

for n_rows in (20_000, 400_000):  # the first brings in what a process needs once
    moment_bytes = n_rows * width * 4
    loaded = source()
    with DiskSparseAdam(
        [("w", nn.Parameter(torch.zeros(n_rows, width)))], state_dir=folder / "s", cache=2_000_000, existing="discard"
    ) as opt:
        run = limited if n_rows == 400_000 else lambda work: work()
        take_over = lambda: opt.load_state_dict(loaded)
        if way == "import":
            run(take_over)
        else:
            take_over()
            opt.checkpoint()
            run((lambda: opt.export_state_dict(folder / f"{n_rows}.pt")) if way == "method" else export_by_command)
        assert opt.moments("w", [n_rows - 1])["exp_avg"][0, 0] == 2
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's limit of private memory")
@pytest.mark.parametrize("way", ["import", "method", ".pt", ".safetensors"])
def test_no_second_copy_of_the_state_in_memory(tmp_path: Path, way: str) -> None:
    """With room for one of the two moments, where everything else has its memory already."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path), way],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
