"""Put what a benchmark found between two markers of a Markdown file, which are comments there."""

from __future__ import annotations

import os
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def markers(name: str) -> tuple[str, str]:
    """The lines between which the block of that name lies."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def replace_block(text: str, name: str, block: str) -> str:
    """The text with what lies between the name's markers replaced.

    Raises:
        ValueError: the markers are not there exactly once each, or are in the wrong order, or the block has them.
    """
    begin, end = markers(name)
    if begin in block or end in block:
        raise ValueError(f"the block for {name!r} holds the markers that are to enclose it")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(
            f"expected the lines {begin!r} and {end!r} once each, found {text.count(begin)} and {text.count(end)}; "
            "put them where the block should be"
        )
    before, rest = text.split(begin)
    if end not in rest:
        raise ValueError(f"{end!r} comes before {begin!r}")
    return f"{before}{begin}\n{block.strip()}\n{end}{rest.split(end)[1]}"


def write_block(path: Path, name: str, block: str) -> bool:
    """Replace the block in the file, whole or not at all; whether it differs from what was there.

    Raises:
        ValueError: see `replace_block`; the message names the file.
        OSError: the file cannot be read or written.
    """
    old = path.read_text(encoding="utf-8")
    try:
        new = replace_block(old, name, block)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if new == old:
        return False
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(new, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return True
