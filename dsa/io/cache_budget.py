"""How much RAM the cache may take, and how it is divided among arenas."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from dsa.errors import ConfigError
from dsa.io.cache import FRAME_OVERHEAD_BYTES

AUTO_MOST_BYTES = 2 << 30
_UNITS = {"": 1, "b": 1, "k": 10, "kib": 10, "m": 20, "mib": 20, "g": 30, "gib": 30, "t": 40, "tib": 40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(name: str, value: object) -> int:
    """A number of bytes from an int or a text such as "2GiB", "512 MiB" or "1.5GB".

    Raises:
        ConfigError: it is neither, or not above 0; the message calls it `name`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        found = _SIZE.fullmatch(value) if isinstance(value, str) else None
        unit = found.group(2).lower() if found else ""
        if found is None or unit not in {*_UNITS, *_DECIMAL}:
            raise ConfigError(f'{name} must be a number of bytes, a size such as "2GiB", or "auto", got {value!r}')
        factor = _DECIMAL.get(unit) or (1 if unit in ("", "b") else 1 << _UNITS[unit])
        nbytes = int(float(found.group(1)) * factor)
    if nbytes <= 0:
        raise ConfigError(f"{name} must be more than 0 bytes, got {value!r}")
    return nbytes


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_room() -> list[int]:
    """Bytes left under each memory limit of the process's control groups (both versions), outermost included."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    room = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        here = base / path.lstrip("/")
        while True:
            most, used = _read_number(here / limit), _read_number(here / usage)
            if most is not None and used is not None and most < 1 << 60:
                room.append(max(most - used, 0))
            if here == base or base not in here.parents:
                break
            here = here.parent
    return room


def available_bytes() -> int | None:
    """RAM that this process may still take: what the system has available, and its control groups allow."""
    amounts = _cgroup_room()
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                amounts.append(int(line.split()[1]) * 1024)
    except OSError:
        names = getattr(os, "sysconf_names", {})
        if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
            amounts.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return min(amounts, default=None)


def cache_bytes(cache: object, state_bytes: int) -> int:
    """The cache's size for a state of `state_bytes` (frames' bookkeeping included).

    Args:
        cache: "auto" (the least of the whole state, a quarter of the memory available, 2 GiB), or as `parse_bytes`.
    """
    if isinstance(cache, str) and cache.strip().lower() == "auto":
        room = available_bytes()
        return max(min(state_bytes, AUTO_MOST_BYTES, state_bytes if room is None else room // 4), 1)
    return parse_bytes("cache", cache)


def divide(total_bytes: int, rows_by_record: Mapping[int, int]) -> dict[int, int]:
    """Frames for each record size: the cache divided by need, never more frames than rows, at least one each.

    Args:
        total_bytes: of all frames together, their bookkeeping included.
        rows_by_record: record bytes -> rows of all tables with such records.
    """
    need = sum((size + FRAME_OVERHEAD_BYTES) * rows for size, rows in rows_by_record.items())
    share = min(1.0, total_bytes / need) if need else 1.0
    return {size: max(1, int(rows * share)) for size, rows in rows_by_record.items()}
