"""How much the cache may take, and who gets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa.errors import ConfigError
from dsa.io import cache_budget
from dsa.io.cache import FRAME_OVERHEAD_BYTES
from dsa.io.cache_budget import AUTO_MOST_BYTES, available_bytes, cache_bytes, divide, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (1 << 40, 1 << 40),
        ("17", 17),
        ("4096B", 4096),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        (" 512 MiB ", 512 << 20),
        ("64KiB", 64 << 10),
        ("1TiB", 1 << 40),
        ("1.5GB", 1_500_000_000),
        ("3kb", 3000),
        ("2 TB", 2 * 10**12),
        ("0.5MiB", 1 << 19),
        ("4k", 4096),
        ("4M", 4 << 20),
        ("4g", 4 << 30),
    ],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_bytes("cache", text) == nbytes
    assert cache_bytes(text, 10) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        "0",
        "0GiB",
        "0.0001",
        "lots",
        "",
        "GiB",
        "-3MiB",
        "1 GiB more",
        "1.2.3",
        "1e9",
        "4 PiB",
        None,
        1.5,
        True,
        [],
    ],
)
def test_what_is_no_size_is_refused_by_name_and_value(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes("cache", value)
    assert str(caught.value).startswith("cache must be ")
    assert repr(value) in str(caught.value)


def _frame(record_bytes: int) -> int:
    return record_bytes + FRAME_OVERHEAD_BYTES


@given(
    total=st.integers(1, 1 << 34),
    rows=st.dictionaries(st.integers(1, 2000).map(lambda n: 8 * n), st.integers(1, 10**7), min_size=1, max_size=5),
)
def test_frames_stay_within_the_total_and_within_the_rows(total: int, rows: dict[int, int]) -> None:
    frames = divide(total, rows)
    assert set(frames) == set(rows)
    assert all(1 <= frames[size] <= rows[size] for size in rows)
    beyond_one = sum(_frame(size) * frames[size] for size in rows if frames[size] > 1)
    assert beyond_one <= total
    need = sum(_frame(size) * rows[size] for size in rows)
    if total >= need:
        assert frames == rows
    else:
        shares = [frames[size] / rows[size] for size in rows]
        assert all(share <= total / need or frames[size] == 1 for share, size in zip(shares, rows, strict=True))
        assert all(frames[size] + 1 > rows[size] * total / need * (1 - 1e-9) for size in rows)


def test_one_table_gets_everything() -> None:
    assert divide(100 * _frame(128), {128: 10_000}) == {128: 100}


def _system(path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the module read a system made of these files."""
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    monkeypatch.setattr(cache_budget, "Path", lambda name: path / str(name).lstrip("/"))


MEMINFO = "MemTotal: 9000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\n"


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({"proc/meminfo": MEMINFO}, 8000000 * 1024),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"}, 8000000 * 1024),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "5\n",
                "sys/fs/cgroup/a/memory.max": "1000000\n",
                "sys/fs/cgroup/a/memory.current": "400000\n",
            },
            600000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.max": "1000\n",
                "sys/fs/cgroup/a/memory.current": "4000\n",
            },
            0,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "5:cpu,memory:/x\n2:pids:/y\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "5\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "70000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "20000\n",
            },
            50000,
        ),
    ],
)
def test_what_is_available(files: dict[str, str], room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _system(tmp_path, files, monkeypatch)
    assert available_bytes() == room


def test_auto_is_the_least_of_state_share_of_memory_and_the_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _system(tmp_path, {"proc/meminfo": "MemAvailable: 1024 kB\n"}, monkeypatch)
    assert cache_bytes("auto", 1000) == 1000
    assert cache_bytes(" AUTO ", 1 << 40) == 1024 * 1024 // 4
    assert cache_bytes("auto", 0) == 1
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1000000000 kB\n")
    assert cache_bytes("auto", 1 << 40) == AUTO_MOST_BYTES
