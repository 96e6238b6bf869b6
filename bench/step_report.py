"""What a run of bench.step shows: tables on the terminal, a Markdown table for the README, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.step_samples import (
    ALONE,
    BOUND,
    CACHED,
    DSA,
    FAST,
    FIO,
    HIDDEN,
    MEMMAP,
    MEMMAP_RANDOM,
    PARTS,
    RAM,
    SMALL,
    TARGETS,
    StepCase,
    ratios,
    seconds,
    us_per_row,
)

_WAYS = (DSA, FAST, RAM, SMALL, MEMMAP, MEMMAP_RANDOM)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _bound(bound: float, at_most: bool) -> str:
    return f"{'at most' if at_most else 'at least'} {bound:g}"


def _rows(count: int) -> str:
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size and count % (size // 10 or 1) == 0:
            return f"{count / size:g} {unit}"
    return f"{count:,}"


def cases_table(cases: Sequence[StepCase]) -> Table:
    """Every case: medians over its rounds, microseconds a row."""
    table = Table(title="medians, us a row (fio: the time for the rows that were missing, a row of the step)")
    for head, justify in (("what", "left"), ("rows", "right"), ("batch", "right"), ("drawn", "left")):
        table.add_column(head, justify="right" if justify == "right" else "left")
    for head in ("cache", "rounds", *_WAYS, FIO, "dsa / bound", "misses", "reference"):
        table.add_column(head, justify="right")
    what = ""
    for case in cases:
        if what and what != case.what:
            table.add_section()
        fio, rows = case.median(FIO, seconds), case.median(DSA, lambda sample: sample.rows)
        against = BOUND if case.what == HIDDEN else FIO
        quotient = case.ratio(DSA, against, seconds) if case.what in (ALONE, HIDDEN) else None
        table.add_row(
            case.what if what != case.what else "",
            f"{_rows(case.table_rows)} x {case.width}",
            f"{case.batch_rows:,}",
            case.distribution,
            f"{case.cache:.0%}",
            str(len(case.samples.get(DSA, ()))),
            *(_number(case.median(way, us_per_row)) for way in _WAYS),
            _number(fio / rows * 1e6 if fio is not None and rows else None),
            _number(quotient),
            _number(case.misses, 0),
            _number(case.reference_misses, 0),
        )
        what = case.what
    return table


def parts_table(cases: Sequence[StepCase]) -> Table:
    """Where our time went, from statistics()."""
    table = Table(title="where the time goes, ms a step")
    for head in ("what", "rows", "batch", "drawn", "cache"):
        table.add_column(head)
    for part in PARTS:
        table.add_column(part, justify="right")
    for case in cases:
        if case.steps:
            table.add_row(
                case.what,
                _rows(case.table_rows),
                f"{case.batch_rows:,}",
                case.distribution,
                f"{case.cache:.0%}",
                *(_number(case.parts_s.get(part, 0.0) / case.steps * 1e3) for part in PARTS),
            )
    return table


def ratios_table(cases: Sequence[StepCase]) -> Table:
    """The ratios beside what they should be."""
    found = ratios(cases)
    table = Table(title="ratios (the worst configuration counts)")
    for head in ("ratio", "found", "wanted", "meaning"):
        table.add_column(head, justify="right" if head in ("found", "wanted") else "left")
    for target in TARGETS:
        value = found[target.name]
        style = None if value is None or target.met(value) else "bold red"
        table.add_row(target.name, _number(value), _bound(target.bound, target.at_most), target.meaning, style=style)
    return table


def fixed_lines(fixed: dict[str, Any]) -> list[str]:
    """What a cached step of 256 rows costs, in words."""
    names = {"alone": "alone", "busy": "beside a busy Python thread"}
    return [
        f"a cached step of 256 rows, {names[name]}: "
        + ("not measured" if one["ms"] is None else f"{one['ms']:.2f} ms, on average {one['mean_ms']:.2f} ms")
        + f" (at most {one['at_most_ms']:g} ms)"
        for name, one in fixed.items()
    ]


def show(console: Console, cases: Sequence[StepCase], found: dict[str, Any]) -> None:
    """Print everything."""
    if cases:
        console.print(cases_table(cases))
        console.print(parts_table(cases))
    console.print(ratios_table(cases))
    for line in fixed_lines(found["fixed_cost_256_rows"]):
        console.print(line, highlight=False)
    console.print(f"file system: {found['settings']['file_system']}", markup=False, highlight=False, soft_wrap=True)
    for note in found["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def markdown(cases: Sequence[StepCase], found: dict[str, Any]) -> str:
    """The README's block."""
    lines = ["| | found | wanted |", "|---|---|---|"]
    for target in TARGETS:
        value = found["ratios"][target.name]
        shown = "not measured" if value is None else f"**{value:.2f}**"
        lines.append(f"| {target.meaning} (`{target.name}`) | {shown} | {_bound(target.bound, target.at_most)} |")
    lines += ["", *(f"{line[0].upper()}{line[1:]}.  " for line in fixed_lines(found["fixed_cost_256_rows"]))]
    some = [case for case in cases if case.what in (CACHED, ALONE, HIDDEN)]
    if some:
        lines += ["", "| us a row | table | drawn | cache | DSA | SparseAdam in RAM |", "|---" * 6 + "|"]
        for case in some:
            what = f"{case.what}, {case.batch_rows:,}"
            ours, theirs = (_number(case.median(way, us_per_row)) for way in (DSA, RAM))
            where = f"{_rows(case.table_rows)} x {case.width} | {case.distribution} | {case.cache:.0%}"
            lines.append(f"| {what} | {where} | {ours} | {theirs} |")
    made = ", ".join(f"{key} {value}" for key, value in found["settings"].items() if key != "file_system")
    lines += ["", f"From one run of `python -m bench.step` ({made}). Medians; the worst configuration counts."]
    lines += [f"File system: {found['settings']['file_system']}."]
    lines += [f"Note: {note}." for note in found["notes"]]
    return "\n".join(lines)


def pictures(cases: Sequence[StepCase], prefix: Path) -> list[Path]:
    """Draw time a row against cache share and against table size, and where the time goes; the files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    named = {name: prefix.with_name(f"{prefix.name}-{name}.png") for name in ("cache", "rows", "parts")}

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    for axis, what in zip(axes, (ALONE, HIDDEN), strict=True):
        _lines(axis, [case for case in cases if case.what == what], "cache")
        axis.set(title=what, xlabel="cache, share of the rows", ylabel="us a row", xscale="log", yscale="log")
        shares = sorted({case.cache for case in cases if case.what == what})
        axis.set_xticks(shares, [f"{share:.0%}" for share in shares], minor=False)
        axis.xaxis.minorticks_off()
    figure.savefig(named["cache"], dpi=110)
    pyplot.close(figure)

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    for axis, what in zip(axes, (CACHED, ALONE), strict=True):
        _lines(axis, [case for case in cases if case.what == what], "rows")
        axis.set(title=what, xlabel="rows of the table", ylabel="us a row", xscale="log", yscale="log")
    figure.savefig(named["rows"], dpi=110)
    pyplot.close(figure)

    some = [case for case in cases if case.steps]
    figure, axis = pyplot.subplots(figsize=(11, 1.5 + 0.28 * len(some)), constrained_layout=True)
    labels = [
        f"{case.what}, {_rows(case.table_rows)}, {case.batch_rows:,}, {case.distribution}, {case.cache:.0%}"
        for case in some
    ]
    left = [0.0] * len(some)
    for part in PARTS:
        wide = [case.parts_s.get(part, 0.0) / case.steps * 1e3 for case in some]
        axis.barh(labels, wide, left=left, label=part)
        left = [a + b for a, b in zip(left, wide, strict=True)]
    axis.invert_yaxis()
    axis.set(title="where the time goes", xlabel="ms a step")
    if some:
        axis.legend()
    figure.savefig(named["parts"], dpi=110)
    pyplot.close(figure)
    return list(named.values())


def _lines(axis: Any, cases: Sequence[StepCase], against: str) -> None:
    """Ours and SparseAdam's time a row, a line for each distribution and for what else differs."""
    groups: dict[str, list[StepCase]] = {}
    for case in cases:
        rest = _rows(case.table_rows) if against == "cache" else f"cache {case.cache:.0%}"
        groups.setdefault(f"{case.distribution}, {rest}, batches of {case.batch_rows:,}", []).append(case)
    for number, (label, some) in enumerate(groups.items()):
        for way, style in ((DSA, "o-"), (RAM, "x:")):
            points = sorted(
                (case.cache if against == "cache" else case.table_rows, value)
                for case in some
                if (value := case.median(way, us_per_row)) is not None
            )
            if points:
                axis.plot(*zip(*points, strict=True), style, color=f"C{number % 10}", label=f"{way}: {label}")
    if groups:
        axis.legend(fontsize=6)
