"""IOConfig: the knobs of the I/O engine and the one home of their defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

from dsa.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
PROBE_FORMAT = "dsa-probe"
PROBE_VERSION = 1


@dataclass(frozen=True)
class DeviceChoice:
    """What a probe of a device says that DSA should use there; the knobs have the names and units of `IOConfig`."""

    backend: str
    direct: bool
    queue_depth: int
    merge_gap_bytes: int
    max_request_bytes: int
    segment_bytes: int | None


class Probe(Protocol):
    """A probe of a device, such as `dsa.io.probe.DeviceProbe`."""

    @property
    def choice(self) -> DeviceChoice:
        """What it recommends."""


@dataclass(frozen=True, kw_only=True)
class IOConfig:
    """How DSA talks to the disk; every default is right for a local NVMe or SATA disk.

    Args:
        queue_depth: requests in flight at once: with the `uring` backend in each of its rings (three for reads, two for
            writes); with `threads` the number of its I/O threads, at most 32; with `aiofiles` as well, at most 16.
        segment_bytes: size of a segment of the log; None: chosen by the sizes of table and cache, at most 4 MiB. It
            grows where not even one record fits.
        merge_gap_bytes: two records are read in one request when at most this much lies between them.
        max_request_bytes: a longer extent is split.
        read_chunk_bytes: records travel from disk to frames in pieces of about this size.
        known_batches, known_rows: batches, and rows in all of them together, that the window remembers; more
            announcements are forgotten, youngest first. A row known costs 23 bytes.
        held_batches: batches, beyond the one being stepped, whose rows are brought into frames ahead of time; None:
            as few as hide the reads; those after the first in at most half the cache.
        dirty_share: write-behind starts when dirty frames are more than this share of the cache; None: when fewer
            frames can be given up than a batch brings in, or a segment of dirty ones should go before them, or a batch
            ahead orders what it should take in a small cache (with a share nothing is ordered); where every row has a
            frame, only when the disk is idle.
        grow_tables: a parameter may have more rows than its table on disk, or than the moments in the state dict of a
            torch.optim.SparseAdam: those that were added begin with zero moments. Otherwise that is refused.
        uvloop: run the event loop on uvloop where it is installed.
        stall_timeout_s: a device that answers nothing for so long is an error.
        probe: a probe of the device, or the file in which `dsa probe --json` saved one: queue_depth, merge_gap_bytes,
            max_request_bytes and segment_bytes come from it where they are not given, and the backend where that is
            "auto" and the probe's works here.

    Raises:
        ConfigError: a value is out of range, or the probe's file cannot be read.
    """

    _given: ClassVar[frozenset[str]]
    _probed_backend: ClassVar[str | None] = None

    queue_depth: int = 64
    segment_bytes: int | None = None
    merge_gap_bytes: int = 4 * KIB
    max_request_bytes: int = 1 * MIB
    read_chunk_bytes: int = 4 * MIB
    known_batches: int = 256
    known_rows: int = 1 << 20
    held_batches: int | None = None
    dirty_share: float | None = None
    grow_tables: bool = False
    uvloop: bool = True
    stall_timeout_s: float = 60.0
    probe: str | Path | Probe | None = None

    def __new__(cls, **given: Any) -> IOConfig:
        """Note which knobs are given: what a probe says must not replace those, even where they are the defaults."""
        config = super().__new__(cls)
        object.__setattr__(config, "_given", frozenset(given))
        return config

    @property
    def probed_backend(self) -> str | None:
        """The backend that the probe found to be the best; None where it names none, and without a probe."""
        return self._probed_backend

    def __post_init__(self) -> None:
        source = self._take_from_probe()
        self._check(source)

    def _take_from_probe(self) -> dict[str, str]:
        """Set the knobs that were not given; which of them came from where."""
        if self.probe is None:
            return {}
        if isinstance(self.probe, (str, Path)):
            chosen, place = _read_choice(Path(self.probe)), str(self.probe)
        else:
            choice = getattr(self.probe, "choice", None)
            if not isinstance(choice, DeviceChoice):
                raise ConfigError(
                    "IOConfig.probe must be the path of a file that `dsa probe --json` wrote, or a DeviceProbe, got "
                    f"{self.probe!r}"
                )
            chosen, place = {name: getattr(choice, name) for name in ("backend", *_PROBED_KNOBS)}, "the probe"
        backend = chosen["backend"]
        if not isinstance(backend, (str, type(None))):
            raise ConfigError(
                f"IOConfig.probe: its choice.backend must be a backend's name, got {backend!r} (from {place})"
            )
        object.__setattr__(self, "_probed_backend", backend)
        source = {}
        for name in _PROBED_KNOBS:
            if name not in self._given:
                object.__setattr__(self, name, chosen[name])
                source[name] = f" (from {place})"
        return source

    def _check(self, source: dict[str, str]) -> None:
        limits: dict[str, tuple[float, float]] = {
            "queue_depth": (1, 4096),
            "segment_bytes": (8 * KIB, 64 * MIB),
            "merge_gap_bytes": (0, 16 * MIB),
            "max_request_bytes": (4 * KIB, 64 * MIB),
            "read_chunk_bytes": (64 * KIB, 256 * MIB),
            "known_batches": (1, 60_000),
            "known_rows": (1, 1 << 32),
            "held_batches": (0, 1 << 20),
            "dirty_share": (0.0, 1.0),
            "stall_timeout_s": (0.001, 1e9),
        }
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if field.name not in limits or (value is None and "None" in str(field.type)):
                continue
            low, high = limits[field.name]
            whole = "float" not in str(field.type)
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                kind = "a whole number" if whole else "a number"
                came = source.get(field.name, "")
                raise ConfigError(f"IOConfig.{field.name} must be {kind} from {low:g} to {high:g}, got {value!r}{came}")
        for name in ("segment_bytes", "max_request_bytes"):
            value = getattr(self, name)
            if value is not None and value % 4096:
                came = source.get(name, "")
                raise ConfigError(f"IOConfig.{name} must be a multiple of 4096, got {value}{came}")


_PROBED_KNOBS = ("queue_depth", "merge_gap_bytes", "max_request_bytes", "segment_bytes")


def _read_choice(path: Path) -> dict[str, Any]:
    """The backend and the knobs that a saved probe recommends."""
    again = f"write it anew with: dsa probe DIRECTORY --json > {path}"
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"IOConfig.probe: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"IOConfig.probe: {path} is not JSON ({error}); {again}") from error
    if not isinstance(found, dict) or found.get("format") != PROBE_FORMAT:
        raise ConfigError(f"IOConfig.probe: {path} is not a saved probe; {again}")
    if found.get("version") != PROBE_VERSION:
        raise ConfigError(
            f"IOConfig.probe: {path} has version {found.get('version')!r}, this program reads {PROBE_VERSION}; {again}"
        )
    choice = found.get("choice")
    choice = choice if isinstance(choice, dict) else {}
    lacking = [name for name in _PROBED_KNOBS if name not in choice]
    if lacking:
        raise ConfigError(f"IOConfig.probe: {path} lacks choice.{', choice.'.join(lacking)}; {again}")
    return {"backend": choice.get("backend"), **{name: choice[name] for name in _PROBED_KNOBS}}
