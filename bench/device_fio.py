"""`fio` as the yardstick: what the device gives to a program that does nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.device_samples import Sample

ENGINES = ("io_uring", "libaio", "psync")
"""Best first; the first that works here is used."""

_ALWAYS = ("--scramble_buffers=0", "--norandommap=1", "--randrepeat=0", "--allow_file_create=0")
_QUICK_START = ("--clocksource=clock_gettime", "--disk_util=0")  # measuring its clock takes fio longer than our jobs
# What costs fio the least processor time: requests and answers in batches, no time stamp of each, memory and file
# registered once.
_TUNED = ("--gtod_reduce=1",)
_REGISTERED = ("--fixedbufs=1", "--registerfiles=1")
_BATCH = 32
_TIMEOUT_S = 300


class NoFio(Exception):
    """fio cannot be used here; the message says why."""


@dataclass(frozen=True)
class Fio:
    """The program, and the engine that works here.

    Args:
        tuned: with the options that cost it the least processor time, instead of their defaults.

    Raises:
        NoFio: (by `find`) there is no fio, or none of the engines works.
    """

    program: str
    engine: str
    version: str
    tuned: bool = False

    @classmethod
    def find(cls, file: Path, direct: bool) -> Fio:
        """Look for fio and try its engines by reading some of `file`."""
        program = shutil.which("fio")
        if program is None:
            raise NoFio("fio is not installed (apt install fio, or the like)")
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()
        reasons = []
        for engine in ENGINES:
            fio = cls(program, engine, version)
            try:
                fio.run(file, "randread", record_bytes=4096, count=64, depth=4, direct=direct)
            except NoFio as error:
                reasons.append(f"{engine}: {error}")
                continue
            return fio
        raise NoFio("; ".join(reasons))

    def command(
        self, file: Path, what: str, *, record_bytes: int, count: int, depth: int, direct: bool, drain_every: int = 0
    ) -> list[str]:
        """The command line of one job; see `run`."""
        command = [
            self.program,
            "--name=bench",
            f"--filename={str(file).replace(':', chr(92) + ':')}",
            f"--rw={what}",
            f"--bs={record_bytes}",
            f"--size={file.stat().st_size // record_bytes * record_bytes}",
            f"--io_size={count * record_bytes}",
            f"--ioengine={self.engine}",
            f"--iodepth={depth}",
            f"--direct={int(direct)}",
            "--output-format=json",
            *_ALWAYS,
            *_QUICK_START,
        ]
        if "read" in what:
            command.append("--readonly")
        if self.tuned:
            command += _TUNED
        if self.tuned and self.engine == "io_uring":
            command += _REGISTERED
        if self.tuned and depth >= 2 * _BATCH:
            command += [f"--iodepth_batch_submit={_BATCH}", f"--iodepth_batch_complete_min={_BATCH}"]
            command.append(f"--iodepth_batch_complete_max={depth}")
        if drain_every:
            # Before it "thinks", for a microsecond, fio waits for all that is in flight.
            command += ["--thinktime=1", f"--thinktime_blocks={drain_every}", "--thinktime_blocks_type=issue"]
        return command

    def run(
        self,
        file: Path,
        what: str,
        *,
        record_bytes: int,
        count: int,
        depth: int,
        direct: bool,
        drain_every: int = 0,
    ) -> Sample:
        """One job on the file: `count` requests of `record_bytes`, timed by fio itself, its start left out.

        Args:
            what: "randread", "randwrite", "read" or "write".
            depth: requests in flight.
            drain_every: nothing is in flight any more after so many requests; 0: only at the end.

        Raises:
            NoFio: it failed, or reported nothing.
        """
        command = self.command(
            file, what, record_bytes=record_bytes, count=count, depth=depth, direct=direct, drain_every=drain_every
        )
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoFio(f"fio could not be run: {error}") from error
        if ended.returncode:
            raise NoFio(f"fio failed with exit {ended.returncode}: {(ended.stderr or ended.stdout).strip()[-300:]}")
        return parse(ended.stdout, record_bytes)


def parse(output: str, record_bytes: int) -> Sample:
    """The sample in fio's JSON (which it may precede by remarks).

    Raises:
        NoFio: there is none, or the job reported an error or no requests.
    """
    try:
        job: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0]
        directions: Sequence[dict[str, Any]] = [job["read"], job["write"]]
        rows = sum(int(direction["total_ios"]) for direction in directions)
        milliseconds = sum(float(direction["runtime"]) for direction in directions)
        cpu_s = (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100 * float(job["job_runtime"]) / 1e3
        failed = int(job["error"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise NoFio(f"fio's answer was not understood ({error!r}): {output[:200]!r}") from error
    if failed or not rows or not milliseconds:
        raise NoFio(f"fio reported error {failed}, {rows} requests in {milliseconds:g} ms")
    return Sample(rows, rows * record_bytes, milliseconds / 1e3, cpu_s)
