"""What a run of bench.device shows: tables on the terminal, a Markdown table for the README, a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.device_samples import READ, TARGETS, WRITE, Case, Sample, ratios, ratios_to_tuned_fio


def _size(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1024 else f"{nbytes // 1024} KiB"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _bound(bound: float, at_most: bool) -> str:
    return f"{'at most' if at_most else 'at least'} {bound:g}"


def cases_table(cases: Sequence[Case]) -> Table:
    """Every way of every case: medians over its rounds."""
    table = Table(title="medians")
    table.add_column("what")
    table.add_column("record", justify="right")
    table.add_column("way")
    for head in ("rounds", "rows/s", "MB/s", "us/row", "CPU us/row"):
        table.add_column(head, justify="right")
    for case in cases:
        for i, (way, samples) in enumerate(case.samples.items()):
            megabytes = case.median(way, lambda sample: sample.bytes_per_s / 1e6)
            table.add_row(
                case.what if i == 0 else "",
                _size(case.record_bytes) if i == 0 else "",
                way,
                str(len(samples)),
                _number(case.median(way, lambda sample: sample.rows_per_s), 0),
                _number(megabytes, 1),
                _number(case.median(way, lambda sample: sample.us_per_row)),
                _number(case.median(way, lambda sample: sample.cpu_us_per_row)),
            )
        table.add_section()
    return table


def ratios_table(cases: Sequence[Case]) -> Table:
    """The ratios beside what they should be."""
    found = ratios(cases)
    table = Table(title="ratios (the worst configuration counts)")
    table.add_column("ratio")
    table.add_column("found", justify="right")
    table.add_column("wanted", justify="right")
    table.add_column("meaning")
    for target in TARGETS:
        value = found[target.name]
        style = None if value is None or target.met(value) else "bold red"
        table.add_row(target.name, _number(value), _bound(target.bound, target.at_most), target.meaning, style=style)
    return table


def show(console: Console, cases: Sequence[Case], notes: Sequence[str], counters: dict[str, Any]) -> None:
    """Print everything."""
    console.print(cases_table(cases))
    console.print(ratios_table(cases))
    if counters["checked"]:
        console.print(
            f"{counters['checked']} measurements of reads agree with the counter of {counters['device']} within "
            f"{counters['worst_difference']:.2%} ({counters['repeated']} were made again)",
            highlight=False,
        )
    for note in notes:
        console.print(f"left out: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def markdown(cases: Sequence[Case], notes: Sequence[str], settings: dict[str, Any]) -> str:
    """The README's block: the ratios, then reads and writes by size."""
    found = ratios(cases)
    lines = ["| | found | wanted |", "|---|---|---|"]
    for target in TARGETS:
        value = found[target.name]
        shown = "not measured" if value is None else f"**{value:.2f}**"
        lines.append(f"| {target.meaning} (`{target.name}`) | {shown} | {_bound(target.bound, target.at_most)} |")
    for what in (READ, WRITE):
        some = [case for case in cases if case.what == what]
        ways = list(dict.fromkeys(way for case in some for way in case.samples))
        if ways:
            lines += ["", f"| {what}s, rows/s | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
            for case in some:
                rates = (_number(case.median(way, lambda sample: sample.rows_per_s), 0) for way in ways)
                lines.append(f"| {_size(case.record_bytes)} | {' | '.join(rates)} |")
    tuned = ratios_to_tuned_fio(cases)
    if tuned["uring_read"] is not None and tuned["uring_cpu"] is not None:
        lines += [
            "",
            "fio runs with its defaults (beside io_uring, direct, the same depth and draining as often). With requests "
            "in batches and registered memory it takes less processor time: random reads of 1 KiB by uring are then "
            f"{tuned['uring_read']:.2f} of its rate at {tuned['uring_cpu']:.2f} of its processor time.",
        ]
    made = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
    lines += ["", f"From one run of `python -m bench.device` ({made}). Medians; the worst configuration counts."]
    lines += [f"Left out: {note}." for note in notes]
    return "\n".join(lines)


def picture(cases: Sequence[Case], path: Path) -> None:
    """Draw rates by record size, and processor time a row, of reads and writes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    drawings: list[tuple[str, str, Callable[[Sample], float | None]]] = [
        (READ, "rows a second", lambda sample: sample.rows_per_s),
        (WRITE, "rows a second", lambda sample: sample.rows_per_s),
        (READ, "processor microseconds a row", lambda sample: sample.cpu_us_per_row),
        (WRITE, "processor microseconds a row", lambda sample: sample.cpu_us_per_row),
    ]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    for axis, (what, label, value) in zip(axes.flat, drawings, strict=True):
        some = [case for case in cases if case.what == what]
        for way in dict.fromkeys(way for case in some for way in case.samples):
            points = [(case.record_bytes, case.median(way, value)) for case in some]
            known = [(size, y) for size, y in points if y is not None]
            axis.plot([size for size, _ in known], [y for _, y in known], marker="o", label=way)
        sizes = [case.record_bytes for case in some]
        axis.set(title=f"{what}s", ylabel=label, xlabel="record", xscale="log", yscale="log")
        axis.set_xticks(sizes, [_size(size) for size in sizes], minor=False)
        axis.minorticks_off()
        if some:
            axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
