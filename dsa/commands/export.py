"""`dsa export DIR FILE`: the moments of one generation as dense tensors, in a file that other programs read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, cast

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from dsa.commands.output import absolute, clear_errors, print_json, progress_bar, size
from dsa.errors import ConfigError, UsageError
from dsa.io.manifest import Generation, Manifest, TableEntry
from dsa.io.reading import Progress, stream
from dsa.io.whole_file import WholeFile, replacing

_SAFETENSORS_DTYPES = {"float32": "F32", "float64": "F64"}
_MOST_GAP_ROWS = 8
_TORCH_SUFFIXES = (".pt", ".pth")
_SPARSE_ADAM_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False}


def export(
    directory: Annotated[Path, typer.Argument(help="The state directory; it may be in use.")],
    file: Annotated[Path, typer.Argument(help="FILE.safetensors, or FILE.pt for a torch.optim.SparseAdam state dict.")],
    generation: Annotated[int | None, typer.Option("--generation", help="Which one; default: the newest.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE where it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the moments of one generation to a file, as dense tensors; they pass through the disk, not through RAM.

    Safetensors: "TABLE.exp_avg", "TABLE.exp_avg_sq", and the step counts in the metadata. A SparseAdam state dict has
    the tables as parameters 0, 1, ... in the order in which they were made, and SparseAdam's default hyperparameters:
    those are not in the state directory, so set them again after loading. It needs its size twice while it is made.
    """
    with clear_errors(as_json=as_json):
        if file.suffix not in (".safetensors", *_TORCH_SUFFIXES):
            raise ConfigError(f"{file}: name a file that ends in .safetensors, .pt or .pth")
        if file.is_dir() or not file.parent.is_dir():
            raise UsageError(f"{file} is a directory" if file.is_dir() else f"{file.parent} is not a directory")
        if file.exists() and not overwrite:
            raise UsageError(f"{file} exists; name another file, or give --overwrite")
        with progress_bar(f"exporting to {file}") as progress:
            write = _write_safetensors if file.suffix == ".safetensors" else _write_state_dict
            sink = write(directory, generation, file, progress)
        nbytes = file.stat().st_size
        number, tables = sink.number, list(sink.steps)
        if as_json:
            places = {"source": absolute(directory), "file": absolute(file)}
            print_json({**places, "bytes": nbytes, "generation": number, "steps": sink.steps})
            return
        typer.echo(f"generation {number} of {directory} is in {file} ({size(nbytes)}): tables {', '.join(tables)}")
        if file.suffix != ".safetensors":
            typer.echo(
                "its hyperparameters are SparseAdam's defaults: the state directory has none; set lr and betas again "
                "after loading"
            )


@dataclass
class _Dense:
    """One tensor in a file: zeros, until rows are written. It begins at byte `begin` of the file."""

    file: WholeFile
    begin: int
    row_bytes: int

    def put(self, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Write rows (ascending); rows between them that were never written are zeros."""
        first = int(rows[0])
        block = np.zeros((int(rows[-1]) - first + 1, values.shape[1]), values.dtype)
        block[rows - first] = values
        self.file.put(self.begin + first * self.row_bytes, block.reshape(-1).view(np.uint8).data)


@dataclass
class _DenseFiles:
    """A sink that puts every field of every table into a place of its own."""

    number: int = -1
    uuid: str = ""
    steps: dict[str, int] = field(default_factory=dict)
    entries: list[TableEntry] = field(default_factory=list)
    places: dict[tuple[str, str], _Dense] = field(default_factory=dict)
    files: list[WholeFile] = field(default_factory=list)

    def begin(self, manifest: Manifest, generation: Generation) -> None:
        """Make the places."""
        self.number, self.uuid = generation.number, manifest.uuid
        self.steps = {state.table: state.step for state in generation.tables}
        self.entries = [entry for entry in manifest.tables if entry.name in self.steps]
        self.make()

    def make(self) -> None:
        """Open files, and set `places`."""
        raise NotImplementedError

    def new_file(self, path: Path) -> WholeFile:
        """A file that `close` closes."""
        self.files.append(WholeFile(path))
        return self.files[-1]

    def put(self, entry: TableEntry, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Part a piece's records into their fields."""
        # In blocks that never span many times the rows that are in them.
        breaks = np.flatnonzero(np.diff(rows) > _MOST_GAP_ROWS) + 1
        for i, name in enumerate(entry.fields):
            part = values[:, i * entry.width : (i + 1) * entry.width]
            place = self.places[entry.name, name]
            for run_of, of in zip(np.split(rows, breaks), np.split(part, breaks), strict=True):
                place.put(run_of, of)

    def close(self) -> None:
        """Close the files."""
        while self.files:
            self.files.pop().close()


def _field_bytes(entry: TableEntry) -> int:
    return entry.n_rows * entry.width * np.dtype(entry.moment_dtype).itemsize


@dataclass
class _Safetensors(_DenseFiles):
    """Eight bytes with the length of a JSON header, the header, the tensors."""

    path: Path = Path()

    def make(self) -> None:
        """Write the header, and set the places behind it."""
        step = {"step": json.dumps(self.steps), "generation": str(self.number), "state_dir_uuid": self.uuid}
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **step}}
        begin = 0
        for entry in self.entries:
            for name in entry.fields:
                end = begin + _field_bytes(entry)
                kind = _SAFETENSORS_DTYPES[entry.moment_dtype]
                header[f"{entry.name}.{name}"] = {
                    "dtype": kind,
                    "shape": list(entry.shape),
                    "data_offsets": [begin, end],
                }
                begin = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        head = len(text).to_bytes(8, "little") + text
        file = self.new_file(self.path)
        file.lengthen(len(head) + begin)
        file.write(head)
        for entry in self.entries:
            for name in entry.fields:
                offset = len(head) + header[f"{entry.name}.{name}"]["data_offsets"][0]
                row_bytes = entry.width * np.dtype(entry.moment_dtype).itemsize
                self.places[entry.name, name] = _Dense(file, offset, row_bytes)


@dataclass
class _TensorFiles(_DenseFiles):
    """Each tensor in a file of its own, from where torch maps it."""

    folder: Path = Path()

    def make(self) -> None:
        """Make the files."""
        for entry in self.entries:
            for name in entry.fields:
                file = self.new_file(self._path(entry, name))
                file.reserve(_field_bytes(entry))  # it will be mapped
                row_bytes = entry.width * np.dtype(entry.moment_dtype).itemsize
                self.places[entry.name, name] = _Dense(file, 0, row_bytes)

    def _path(self, entry: TableEntry, name: str) -> Path:
        return self.folder / f"{self.entries.index(entry)}-{name}"

    def tensor(self, entry: TableEntry, name: str) -> torch.Tensor:
        """The tensor, mapped."""
        kind = torch.float64 if entry.moment_dtype == "float64" else torch.float32
        count = entry.n_rows * entry.width
        if count == 0:
            return torch.zeros(entry.shape, dtype=kind, device="cpu")
        mapped = torch.from_file(str(self._path(entry, name)), shared=True, size=count, dtype=kind)
        return mapped.view(entry.shape)


def _write_safetensors(directory: Path, number: int | None, file: Path, progress: Progress) -> _DenseFiles:
    with replacing(file) as folder:
        sink = _Safetensors(path=folder / "whole")
        try:
            stream(directory, number, sink, progress)
            sink.files[0].sync()
        finally:
            sink.close()
    return sink


def _write_state_dict(directory: Path, number: int | None, file: Path, progress: Progress) -> _DenseFiles:
    with replacing(file) as folder:
        sink = _TensorFiles(folder=folder)
        try:
            stream(directory, number, sink, progress)
        finally:
            sink.close()
        state = {
            i: {
                "step": sink.steps[entry.name],
                **{name: sink.tensor(entry, name) for name in ("exp_avg", "exp_avg_sq")},
            }
            for i, entry in enumerate(sink.entries)
            if sink.steps[entry.name]  # as SparseAdam: no state before the first gradient
        }
        names = [entry.name for entry in sink.entries]
        group = {**_SPARSE_ADAM_DEFAULTS, "params": list(range(len(names))), "param_names": names}
        with WholeFile(folder / "whole") as whole:
            torch.save({"state": state, "param_groups": [group]}, cast("IO[bytes]", whole))
            whole.sync()
    return sink
