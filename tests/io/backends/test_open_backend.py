"""Which backend is opened, and what is said about it."""

from __future__ import annotations

import logging
import os
import sys
import threading

import pytest

from dsa.config import DeviceChoice, IOConfig
from dsa.errors import ConfigError
from dsa.io import backends
from dsa.io.backends import AiofilesBackend, ThreadsBackend, open_backend


def broken(config: IOConfig) -> ThreadsBackend:
    raise OSError(38, "no such call")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'mmap'.* auto, .*threads, aiofiles"):
        open_backend("mmap", IOConfig())


@pytest.mark.parametrize(("name", "kind"), [("threads", ThreadsBackend), ("aiofiles", AiofilesBackend)])
def test_a_backend_is_opened_by_its_name(name: str, kind: type, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dsa")
    backend = open_backend(name, IOConfig())
    assert type(backend) is kind
    assert backend.name == name
    assert [record.getMessage() for record in caplog.records] == [f"backend {name} (asked for by name)"]
    backend.shut_down(30)


def test_auto_takes_the_first_that_works_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        backends, "CANDIDATES", (("fast", broken), ("threads", ThreadsBackend), ("aiofiles", AiofilesBackend))
    )
    caplog.set_level(logging.INFO, "dsa")
    backend = open_backend("auto", IOConfig())
    assert backend.name == "threads"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "backend threads (fast cannot work here: [Errno 38] no such call)"
    backend.shut_down(30)


CANNOT = "cannot work here: [Errno 38] no such call"


class Probed:
    """A probe that found a backend to be the best."""

    def __init__(self, backend: str) -> None:
        self.choice = DeviceChoice(backend, False, 8, 4096, 1 << 20, None)


@pytest.mark.parametrize(
    ("asked", "probed", "opened", "line"),
    [
        ("auto", "aiofiles", "aiofiles", "backend aiofiles (chosen by the probe)"),
        ("auto", "fast", "threads", f"backend threads (fast, chosen by the probe, {CANNOT})"),
        (
            "auto",
            "later",
            "threads",
            f"backend threads (later, chosen by the probe, is not a backend of this program; fast {CANNOT})",
        ),
        ("threads", "aiofiles", "threads", "backend threads (asked for by name)"),
    ],
)
def test_auto_takes_the_backend_that_a_probe_chose_if_it_works_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: str, probed: str, opened: str, line: str
) -> None:
    candidates = (("fast", broken), ("threads", ThreadsBackend), ("aiofiles", AiofilesBackend))
    monkeypatch.setattr(backends, "CANDIDATES", candidates)
    caplog.set_level(logging.INFO, "dsa")
    backend = open_backend(asked, IOConfig(probe=Probed(probed)))
    assert backend.name == opened
    assert [record.getMessage() for record in caplog.records] == [line]
    backend.shut_down(30)


@pytest.mark.parametrize("name", ["auto", "fast"])
def test_nothing_that_works_is_an_error_with_the_reasons(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(backends, "CANDIDATES", (("fast", broken),))
    with pytest.raises(ConfigError, match=r"fast cannot work here: .*no such call"):
        open_backend(name, IOConfig())


def test_threads_refuses_a_system_without_pread_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    monkeypatch.setattr(os, "name", "nt")
    try:
        with pytest.raises(ConfigError, match=f"pread, and this is {sys.platform}"):
            open_backend("threads", IOConfig())
    finally:
        monkeypatch.undo()
    assert threading.active_count() == before
