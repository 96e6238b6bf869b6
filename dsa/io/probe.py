"""Measures the device under a directory, with the program's own backends, and says what DSA would choose there."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa.config import MIB, PROBE_FORMAT, PROBE_VERSION, DeviceChoice, IOConfig
from dsa.errors import ConfigError, UsageError
from dsa.io.backends import CANDIDATES
from dsa.io.backends import direct as direct_io
from dsa.io.device_choice import DeviceFigures, choose
from dsa.io.probe_trial import FIGURE_BYTES, Rate, Trial, free_bytes

FILE_BYTES = 256 * MIB
"""The trial file is so long, or shorter where the device does not write so much in the time that there is."""
_NEARLY = 0.93  # of the best rate: the least queue depth that reaches it is enough, the first backend too


@dataclass(frozen=True)
class BackendFound:
    """A backend, and why it cannot work here (empty: it can)."""

    name: str
    reason: str

    @property
    def works(self) -> bool:
        """Whether it can be used here."""
        return not self.reason


@dataclass(frozen=True)
class DeviceProbe:
    """What was measured in a directory, and what follows.

    Args:
        path: the directory, resolved.
        direct: bytes really bypass the page cache there, in multiples of `alignment`; direct_reason: how that is known.
        backends: every backend, best first.
        rates: random reads and writes.
        sequential_read_bytes_per_s, sequential_write_bytes_per_s: the latter with a sync at the end.
        file_bytes: the length of the trial file.
        cached: the page cache could not be kept out: reads may be of RAM.
        figures, choice: what follows.
    """

    path: str
    direct: bool
    alignment: int
    direct_reason: str
    backends: tuple[BackendFound, ...]
    rates: tuple[Rate, ...]
    sequential_read_bytes_per_s: float
    sequential_write_bytes_per_s: float
    file_bytes: int
    cached: bool
    figures: DeviceFigures
    choice: DeviceChoice

    def to_json(self) -> str:
        """As text, which `from_json` and `IOConfig(probe=FILE)` read."""
        found = {"format": PROBE_FORMAT, "version": PROBE_VERSION, **dataclasses.asdict(self)}
        return json.dumps(found, indent=2)

    @classmethod
    def from_json(cls, text: str) -> DeviceProbe:
        """The probe of such a text.

        Raises:
            ConfigError: it is none, or of another version.
        """
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"not a saved probe: {error}") from error
        if not isinstance(found, dict) or found.get("format") != PROBE_FORMAT:
            raise ConfigError(f'not a saved probe: it has no "format": "{PROBE_FORMAT}"')
        if found.get("version") != PROBE_VERSION:
            raise ConfigError(f"a probe of version {found.get('version')!r}; this program reads {PROBE_VERSION}")
        try:
            return cls(
                **{field.name: found[field.name] for field in dataclasses.fields(cls) if field.name not in _PARTS},
                backends=tuple(BackendFound(**part) for part in found["backends"]),
                rates=tuple(Rate(**part) for part in found["rates"]),
                figures=DeviceFigures(**found["figures"]),
                choice=DeviceChoice(**found["choice"]),
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"a saved probe with parts missing or unknown: {error}") from error


_PARTS = ("backends", "rates", "figures", "choice")


def load_probe(path: str | os.PathLike[str]) -> DeviceProbe:
    """The probe saved in a file.

    Raises:
        ConfigError: the file cannot be read, or holds no probe; the message names it.
    """
    try:
        return DeviceProbe.from_json(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def probe(path: str | os.PathLike[str], *, seconds: float = 6.0, file_bytes: int = FILE_BYTES) -> DeviceProbe:
    """Measure the device under a directory, on a temporary file in it that is always removed.

    Args:
        seconds: about how long measuring takes, without what slow devices need to sync.
        file_bytes: the trial file's length at most, at least 1 MiB.

    Raises:
        ConfigError: the path is not a directory, or an argument is out of range.
        UsageError: there is too little free space, or no backend works.
        DeviceError: the device failed.
    """
    directory = Path(path).resolve()
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; name the directory that is to hold the state")
    if not seconds > 0 or file_bytes < MIB:
        raise ConfigError(f"seconds must be above 0 and file_bytes at least {MIB}, got {seconds!r} and {file_bytes!r}")
    free = free_bytes(directory)
    if free < 2 * file_bytes:
        raise UsageError(
            f"{directory} has {free} bytes free; the probe writes a file of {file_bytes} and asks for twice that. "
            "Make room, or give a smaller file_bytes"
        )
    backends = _find_backends()
    working = [found.name for found in backends if found.works]
    if not working:
        raise UsageError("no backend works here: " + "; ".join(f"{b.name}: {b.reason}" for b in backends))
    direct = direct_io.probe(directory)
    with Trial(directory, file_bytes, working, seconds) as trial:
        trial.run()
        rates, sequential = tuple(trial.rates), (trial.sequential_read, trial.sequential_write)
        cached, length = trial.cached, trial.file_bytes
    best = _best_backend(working, rates)
    figures = _figures(best, rates, *sequential)
    return DeviceProbe(
        path=str(directory),
        direct=direct.works,
        alignment=direct.alignment,
        direct_reason=direct.reason,
        backends=backends,
        rates=rates,
        sequential_read_bytes_per_s=sequential[0],
        sequential_write_bytes_per_s=sequential[1],
        file_bytes=length,
        cached=cached,
        figures=figures,
        choice=choose(figures, backend=best, direct=direct.works),
    )


def _find_backends() -> tuple[BackendFound, ...]:
    found = []
    for name, factory in CANDIDATES:
        try:
            factory(IOConfig(queue_depth=1)).shut_down(1.0)
        except Exception as error:
            # Whatever keeps one from working is what the user wants to read.
            found.append(BackendFound(name, str(error) or type(error).__name__))
        else:
            found.append(BackendFound(name, ""))
    return tuple(found)


def _read_rates(rates: tuple[Rate, ...], backend: str) -> Mapping[int, float]:
    """Reads of the size that figures are taken from, by queue depth."""
    chosen = (r for r in rates if r.backend == backend and r.what == "read" and r.size_bytes == FIGURE_BYTES)
    return {rate.queue_depth: rate.per_s for rate in chosen}


def _best_backend(working: list[str], rates: tuple[Rate, ...]) -> str:
    fastest = {name: max(_read_rates(rates, name).values()) for name in working}
    return next(name for name in working if fastest[name] >= _NEARLY * max(fastest.values()))


def _figures(backend: str, rates: tuple[Rate, ...], read_bytes_per_s: float, write_bytes_per_s: float) -> DeviceFigures:
    reads = _read_rates(rates, backend)
    depth = min(depth for depth, per_s in reads.items() if per_s >= _NEARLY * max(reads.values()))
    writes = [rate for rate in rates if rate.what == "write" and rate.size_bytes == FIGURE_BYTES]
    single = min(writes, key=lambda rate: rate.queue_depth)
    return DeviceFigures(
        read_request_s=1 / max(reads.values()),
        write_request_s=1 / max(rate.per_s for rate in writes),
        read_latency_s=1 / reads[min(reads)],
        write_latency_s=1 / single.per_s,
        read_bytes_per_s=read_bytes_per_s,
        write_bytes_per_s=write_bytes_per_s,
        queue_depth=depth,
    )


def report(found: DeviceProbe) -> dict[str, Any]:
    """The choice in words: what for which knob, and why."""
    choice, figures = found.choice, found.figures
    megabytes = figures.read_bytes_per_s / 1e6
    works = ", ".join(b.name if b.works else f"{b.name} (no: {b.reason})" for b in found.backends)
    return {
        "backend": (choice.backend, works),
        "direct I/O": ("yes" if choice.direct else "no", found.direct_reason),
        "queue_depth": (choice.queue_depth, "the least that keeps the device busy"),
        "merge_gap_bytes": (
            choice.merge_gap_bytes,
            f"a request costs {figures.read_request_s * 1e6:.1f} us, reading on {megabytes:,.0f} bytes a us",
        ),
        "max_request_bytes": (choice.max_request_bytes, "so long, a request's fixed cost is hidden"),
        "segment_bytes": (choice.segment_bytes or "by the table", "by the table's and the cache's size, at most 4 MiB"),
    }
