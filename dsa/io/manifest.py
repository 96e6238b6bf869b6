"""The manifest: which tables a state directory holds and which generations of them one can return to.

A manifest is one JSON object, whole blocks of 4096 bytes long (padded with spaces):

    {"program":"disk-sparse-adam","format_version":1,"check":"<32 hex digits>","body":{...}}

`check` is the 16-byte BLAKE2b digest of the body in canonical form (sorted keys, no spaces, ASCII). The file as a
whole must be exactly what `encode` makes of it, so that no flipped byte goes unseen. A key that this version does not
know is refused: within one format version the keys are fixed, new ones come with a new version.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, NoReturn

from dsa.errors import CorruptError, FormatError

FORMAT_VERSION = 1
BLOCK_BYTES = 4096
SIGNATURE = b'{"program":"disk-sparse-adam",'

TABLE_FILE = re.compile(r"tables/([0-9]{3,9})-[A-Za-z0-9._-]{1,64}\.log")
INDEX_FILE = re.compile(r"index/([0-9]{6,18})-([0-9]{3,9}-[A-Za-z0-9._-]{1,64})\.idx")
_MOST = (1 << 63) - 1


@dataclass(frozen=True)
class TableEntry:
    """What never changes about a table (only its number of rows may grow).

    Args:
        name: the parameter's name.
        shape: the parameter's shape; `shape[0]` is the number of rows.
        dtype, moment_dtype: of the parameter and of its moments, such as "float32".
        width: elements of a row.
        fields: what a record holds, in order.
        record_bytes, segment_bytes, slots_per_segment: the layout of the log.
        file: the log, relative to the state directory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    moment_dtype: str
    width: int
    fields: tuple[str, ...]
    record_bytes: int
    segment_bytes: int
    slots_per_segment: int
    file: str

    @property
    def n_rows(self) -> int:
        return self.shape[0]


@dataclass(frozen=True)
class TableState:
    """One table in one generation.

    Args:
        table: the table's name.
        step: the parameter's step count.
        index_file: relative to the state directory; None: no row was ever written.
        index_check: check of the index file's header, which holds the checks of all its other bytes.
        live_rows: rows that have a record.
        n_segments: length of the log in segments.
        fingerprint: of some weight rows, None where none was taken.
    """

    table: str
    step: int
    index_file: str | None
    index_check: int
    live_rows: int
    n_segments: int
    fingerprint: int | None


@dataclass(frozen=True)
class Generation:
    """A committed state of all tables.

    Args:
        number: never used for another generation of this directory.
        counted: handed out to the user, so that it counts toward `keep_generations`.
        created: seconds since 1970.
        tables: one state for each table that existed then.
    """

    number: int
    counted: bool
    created: float
    tables: tuple[TableState, ...]

    def state(self, table: str) -> TableState | None:
        return next((state for state in self.tables if state.table == table), None)


@dataclass(frozen=True)
class Manifest:
    """Everything that a state directory holds; generations in ascending order of their numbers, at least one."""

    uuid: str
    next_number: int
    tables: tuple[TableEntry, ...]
    generations: tuple[Generation, ...]
    format_version: int = FORMAT_VERSION

    def entry(self, table: str) -> TableEntry | None:
        return next((entry for entry in self.tables if entry.name == table), None)

    def generation(self, number: int) -> Generation | None:
        return next((generation for generation in self.generations if generation.number == number), None)

    def index_files(self) -> set[str]:
        """The index files that any generation refers to."""
        return {s.index_file for g in self.generations for s in g.tables if s.index_file is not None}


def table_file(name: str, taken: Iterable[str]) -> str:
    """A name for a table's log that every file system takes: a number of its own, and what is plain of `name`.

    Args:
        name: the parameter's name.
        taken: the files of the other tables.
    """
    numbers = [int(found.group(1)) for file in taken if (found := TABLE_FILE.fullmatch(file))]
    slug = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:64] or "_"
    return f"tables/{max(numbers, default=-1) + 1:03d}-{slug}.log"


def index_file(entry: TableEntry, number: int) -> str:
    """The name of the table's index file written by generation `number`."""
    stem = entry.file.removeprefix("tables/").removesuffix(".log")
    return f"index/{number:06d}-{stem}.idx"


def encode(manifest: Manifest) -> bytes:
    """The manifest's file, whole blocks long."""
    body = asdict(manifest)
    version = body.pop("format_version")
    text = _canonical(body)
    head = f'"format_version":{version},"check":"{_digest(text)}","body":'
    data = SIGNATURE + head.encode() + text + b"}"
    return data.ljust(-(-(len(data) + 1) // BLOCK_BYTES) * BLOCK_BYTES - 1) + b"\n"


def decode(data: bytes, path: PurePath) -> Manifest:
    """Read what `encode` made.

    Raises:
        FormatError: not a manifest of this program, or of another format version.
        CorruptError: one of ours that does not match its check.
    """
    if not data.strip(b"\0"):
        raise CorruptError(f"{path}: holds nothing ({len(data)} bytes), the manifest was lost; use another copy of it")
    if not data.startswith(SIGNATURE):
        raise FormatError(f"{path}: not a manifest of this program; choose another state_dir")
    try:
        outer = json.loads(data)
        version, check, body = outer["format_version"], outer["check"], outer["body"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"{path}: the manifest is damaged or cut short ({error})") from None
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise FormatError(
            f"{path}: format version {version!r}, this program reads version {FORMAT_VERSION}; "
            "use the program's version that wrote it"
        )
    found = _digest(_canonical(body))
    if found != check:
        raise CorruptError(f"{path}: the manifest does not match its check (stored {check!r}, computed {found!r})")
    try:
        manifest = _manifest(body)
    except _WrongShapeError as error:
        raise FormatError(f"{path}: the manifest does not have the form of version {FORMAT_VERSION}: {error}") from None
    if encode(manifest) != data:
        raise CorruptError(f"{path}: the manifest's bytes are not those that were written, though its values are")
    return manifest


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=16).hexdigest()


# Reading values whose types nobody has promised.


class _WrongShapeError(Exception):
    """A value is missing, extra, of another type or out of range."""


_Reader = Callable[[Any, str], Any]


def _wrong(where: str, wanted: str, value: Any) -> NoReturn:
    raise _WrongShapeError(f"{where} should be {wanted}, is {repr(value)[:80]}")


def _whole(low: int = 0, high: int = _MOST) -> _Reader:
    def read(value: Any, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            _wrong(where, f"a whole number from {low} to {high}", value)
        return value

    return read


def _text(value: Any, where: str) -> str:
    return value if isinstance(value, str) else _wrong(where, "text", value)


def _truth(value: Any, where: str) -> bool:
    return value if isinstance(value, bool) else _wrong(where, "true or false", value)


def _seconds(value: Any, where: str) -> float:
    return value if isinstance(value, float) and math.isfinite(value) else _wrong(where, "a decimal number", value)


def _matching(pattern: re.Pattern[str]) -> _Reader:
    def read(value: Any, where: str) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            _wrong(where, f"a name like {pattern.pattern}", value)
        return value

    return read


def _maybe(reader: _Reader) -> _Reader:
    return lambda value, where: None if value is None else reader(value, where)


def _several(reader: _Reader, least: int = 0) -> _Reader:
    def read(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) < least:
            _wrong(where, f"a list of at least {least}", value)
        return tuple(reader(item, f"{where}[{i}]") for i, item in enumerate(value))

    return read


def _record(kind: Callable[..., Any], readers: dict[str, _Reader]) -> _Reader:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict) or set(value) != set(readers):
            keys = sorted(value) if isinstance(value, dict) else value
            _wrong(where, f"an object with the keys {sorted(readers)}", keys)
        return kind(**{key: reader(value[key], f"{where}.{key}") for key, reader in readers.items()})

    return read


_entry = _record(
    TableEntry,
    {
        "name": _text,
        "shape": _several(_whole(), least=1),
        "dtype": _text,
        "moment_dtype": _text,
        "width": _whole(),
        "fields": _several(_text, least=1),
        "record_bytes": _whole(),
        "segment_bytes": _whole(1),
        "slots_per_segment": _whole(1),
        "file": _matching(TABLE_FILE),
    },
)
_state = _record(
    TableState,
    {
        "table": _text,
        "step": _whole(),
        "index_file": _maybe(_matching(INDEX_FILE)),
        "index_check": _whole(0, (1 << 32) - 1),
        "live_rows": _whole(),
        "n_segments": _whole(),
        "fingerprint": _maybe(_whole(-_MOST - 1, (1 << 64) - 1)),
    },
)
_generation = _record(
    Generation, {"number": _whole(), "counted": _truth, "created": _seconds, "tables": _several(_state)}
)
_read_body = _record(
    Manifest,
    {
        "uuid": _text,
        "next_number": _whole(1),
        "tables": _several(_entry),
        "generations": _several(_generation, least=1),
    },
)


def _manifest(body: Any) -> Manifest:
    manifest: Manifest = _read_body(body, "body")
    try:
        plain = str(uuid.UUID(manifest.uuid))
    except ValueError:
        plain = ""
    if plain != manifest.uuid:
        _wrong("body.uuid", "a UUID", manifest.uuid)
    names = {entry.name for entry in manifest.tables}
    if len(names) < len(manifest.tables) or len({e.file for e in manifest.tables}) < len(manifest.tables):
        _wrong("body.tables", "tables with names and files of their own", [(e.name, e.file) for e in manifest.tables])
    numbers = [generation.number for generation in manifest.generations]
    if numbers != sorted(set(numbers)) or numbers[-1] >= manifest.next_number:
        _wrong("body.generations", f"in ascending order, below {manifest.next_number}", numbers)
    for generation in manifest.generations:
        of = [state.table for state in generation.tables]
        if len(set(of)) < len(of) or not names.issuperset(of):
            _wrong(f"generation {generation.number}", f"of tables among {sorted(names)}, each once", of)
    return manifest
