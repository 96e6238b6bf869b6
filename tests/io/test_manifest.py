"""The manifest's file: what is written is read again, and no other bytes are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa.errors import CorruptError, FormatError, StateFileError
from dsa.io.manifest import (
    INDEX_FILE,
    TABLE_FILE,
    Generation,
    Manifest,
    TableEntry,
    TableState,
    _canonical,
    _digest,
    decode,
    encode,
    index_file,
    table_file,
)

PATH = PurePath("run/adam/manifest.json")
UUID = "12345678-1234-5678-1234-567812345678"


def entry(name="node_emb.weight", shape=(100, 3), number=0, **changes) -> TableEntry:
    made = TableEntry(
        name, shape, "float32", "float32", 3, ("exp_avg", "exp_avg_sq"), 24, 4096, 160, f"tables/{number:03d}-t.log"
    )
    return replace(made, **changes)


def example() -> Manifest:
    states = (
        TableState("node_emb.weight", 7, "index/000003-000-t.idx", 0xDEADBEEF, 60, 2, -5),
        TableState("rel", 7, None, 0, 0, 0, None),
    )
    generations = (Generation(0, False, 1.0e9, states[1:]), Generation(3, True, 1.5e9, states))
    return Manifest(UUID, 4, (entry(), entry("rel", (5, 3), 1)), generations)


whole = st.integers(0, (1 << 63) - 1)


@st.composite
def manifests(draw):
    names = draw(st.lists(st.text(), unique=True, max_size=3))
    tables = [
        TableEntry(
            name,
            tuple(draw(st.lists(whole, min_size=1, max_size=3))),
            draw(st.sampled_from(["float32", "bfloat16"])),
            "float32",
            draw(whole),
            tuple(draw(st.lists(st.text(), min_size=1, max_size=3))),
            draw(whole),
            draw(st.integers(1, 1 << 40)),
            draw(st.integers(1, 1 << 40)),
            f"tables/{i:03d}-x.log",
        )
        for i, name in enumerate(names)
    ]
    generations = []
    for number in sorted(draw(st.sets(st.integers(0, 1 << 40), min_size=1, max_size=3))):
        states = [
            TableState(
                name,
                draw(whole),
                draw(st.none() | st.just(f"index/{number:06d}-000-x.idx")),
                draw(st.integers(0, (1 << 32) - 1)),
                draw(whole),
                draw(whole),
                draw(st.none() | st.integers(-(1 << 63), (1 << 64) - 1)),
            )
            for name in names
            if draw(st.booleans())
        ]
        created = draw(st.floats(0, 1e12))
        generations.append(Generation(number, draw(st.booleans()), created, tuple(states)))
    following = generations[-1].number + draw(st.integers(1, 9))
    return Manifest(str(draw(st.uuids())), following, tuple(tables), tuple(generations))


@given(manifests())
def test_what_is_written_is_read_again(manifest):
    data = encode(manifest)
    assert decode(data, PATH) == manifest
    assert len(data) % 4096 == 0
    json.loads(data)  # plain JSON for other tools


def test_every_flipped_byte_is_found():
    data = encode(example())
    used = len(data.rstrip())
    for at in [*range(used + 8), len(data) - 2, len(data) - 1]:
        for flip in (0x01, 0x20, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with pytest.raises(StateFileError, match=r"manifest\.json"):
                decode(bytes(damaged), PATH)


def test_every_truncation_and_extension_is_found():
    data = encode(example())
    for length in [*range(len(data.rstrip()) + 2), len(data) - 1]:
        with pytest.raises(StateFileError):
            decode(data[:length], PATH)
    for extended in (data + b" ", data + b"\n", data + data):
        with pytest.raises(CorruptError):
            decode(extended, PATH)


@pytest.mark.parametrize("data", [b"", b"\0" * 4096])
def test_lost_bytes_are_damage(data):
    with pytest.raises(CorruptError, match="holds nothing"):
        decode(data, PATH)


@pytest.mark.parametrize(
    "data", [b"{}", b"[]", b"\xff\xfe", b'{"name": "my web app"}', b"[" * 100_000, b"0" * 5000, b"null"]
)
def test_foreign_files_are_not_ours(data):
    with pytest.raises(FormatError, match="not a manifest of this program"):
        decode(data, PATH)


@pytest.mark.parametrize("tail", [b"[" * 100_000, b'"x":' + b"9" * 5000 + b"}", b'"body":1}', b""])
def test_our_beginning_with_a_foreign_end_is_damage(tail):
    with pytest.raises(CorruptError):
        decode(b'{"program":"disk-sparse-adam",' + tail, PATH)


def test_an_unknown_version_is_refused_with_both_numbers():
    with pytest.raises(FormatError, match=r"version 2, .* version 1"):
        decode(encode(replace(example(), format_version=2)), PATH)


def resealed(change) -> bytes:
    """The example's file with another body, and the check that belongs to it."""
    outer = json.loads(encode(example()))
    change(outer["body"])
    text = _canonical(outer["body"])
    data = b'{"program":"disk-sparse-adam","format_version":1,"check":"%s","body":%s}' % (_digest(text).encode(), text)
    return data.ljust(-(-(len(data) + 1) // 4096) * 4096 - 1) + b"\n"


def test_resealing_changes_nothing_by_itself():
    assert resealed(lambda body: None) == encode(example())


def paths(value, at=()):
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*at, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from paths(item, (*at, i))


@pytest.mark.parametrize("foreign", [{}, [1], "\udc80 text", True, 1.5, -(1 << 70), None])
def test_values_of_a_wrong_type_never_escape(foreign):
    """Each value of the body in turn, replaced: a clear refusal, or (a text for a text) a manifest."""
    refused = 0
    for path in paths(json.loads(encode(example()))["body"]):
        if not path:
            continue

        def change(body, path=path):
            for key in path[:-1]:
                body = body[key]
            body[path[-1]] = foreign

        data = resealed(change)
        try:
            assert encode(decode(data, PATH)) == data
        except FormatError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda body: body.update(extra=1), "extra"),
        (lambda body: body.pop("uuid"), "uuid"),
        (lambda body: body["tables"][0].update(file="tables/../../etc/passwd"), "file"),
        (lambda body: body["generations"][1]["tables"][0].update(index_file="../x.idx"), "index_file"),
        (lambda body: body["tables"][1].update(name="node_emb.weight"), "names"),
        (lambda body: body["tables"][1].update(file="tables/000-t.log"), "files"),
        (lambda body: body["generations"].reverse(), "ascending"),
        (lambda body: body.update(next_number=3), "below 3"),
        (lambda body: body.update(generations=[]), "generations"),
        (lambda body: body.update(uuid="me"), "UUID"),
        (lambda body: body["generations"][1]["tables"][1].update(table="who"), "who"),
        (lambda body: body["generations"][1]["tables"][1].update(table="node_emb.weight"), "each once"),
    ],
)
def test_values_that_do_not_belong_together_are_refused(change, named):
    with pytest.raises(FormatError, match=named):
        decode(resealed(change), PATH)


@given(st.lists(st.text(), max_size=5))
def test_table_files_are_plain_and_unique_on_any_file_system(names):
    taken: list[str] = []
    for name in names:
        taken.append(table_file(name, taken))
    assert all(TABLE_FILE.fullmatch(file) and len(file) < 100 for file in taken)
    assert len({file.lower() for file in taken}) == len(names)
    assert all(INDEX_FILE.fullmatch(index_file(entry(file=file), 12)) for file in taken)


def test_table_files_tell_their_parameter():
    assert table_file("node_emb.weight", []) == "tables/000-node_emb.weight.log"
    assert table_file("a/b c", ["tables/004-x.log"]) == "tables/005-a_b_c.log"
    assert index_file(entry(file="tables/005-a_b_c.log"), 12) == "index/000012-005-a_b_c.idx"
