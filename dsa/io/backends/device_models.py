"""Devices by their figures: what a disk, an SSD or a volume over a network takes for a request. Pure.

The named ones are typical of their kind, rounded; none is a particular product. How requests queue and what each takes
is in device_queues.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dsa.io.device_choice import DeviceFigures


class Probed(Protocol):
    """A probe of a device, as far as a model needs it."""

    @property
    def path(self) -> str:
        """The directory that was probed."""

    @property
    def figures(self) -> DeviceFigures:
        """What was found."""


@dataclass(frozen=True)
class DeviceModel:
    """A device that an `EmulatedBackend` can be.

    Args:
        name: what reports call it.
        sync_s: how long a sync takes.
    """

    name: str
    sync_s: float

    @property
    def figures(self) -> DeviceFigures:
        """The device as the choice of knobs sees it."""
        raise NotImplementedError

    @staticmethod
    def from_probe(probe: Probed) -> ParallelDevice:
        """The device that was probed: its costs of requests, sequential rates and latencies, without jitter."""
        figures = probe.figures
        return ParallelDevice(
            name=f"probed {probe.path}",
            sync_s=figures.write_latency_s,
            lanes=figures.queue_depth,
            read_latency_s=figures.read_latency_s,
            write_latency_s=figures.write_latency_s,
            read_request_s=figures.read_request_s,
            write_request_s=figures.write_request_s,
            read_bytes_per_s=figures.read_bytes_per_s,
            write_bytes_per_s=figures.write_bytes_per_s,
        )


@dataclass(frozen=True)
class ParallelDevice(DeviceModel):
    """A device without moving parts: it works on several requests at once, and all of them share one pipe.

    A request takes the pipe for its cost, or for its bytes where that is more; it is over at the earliest one latency
    after one of the lanes took it. So few requests in flight see the latency, many the pipe. Reads and writes wait for
    the lanes in lines of their own, and take turns by the time of the pipe that each line has had.

    Args:
        lanes: requests that the device works on at once.
        read_latency_s, write_latency_s: the mean; jitter: the share of it that is random (exponential).
        read_request_s, write_request_s: what a request takes of the pipe at least.
        read_bytes_per_s, write_bytes_per_s: the pipe's rates.
    """

    lanes: int
    read_latency_s: float
    write_latency_s: float
    read_request_s: float
    write_request_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    jitter: float = 0.0

    @property
    def figures(self) -> DeviceFigures:
        return DeviceFigures(
            read_request_s=max(self.read_request_s, self.read_latency_s / self.lanes),
            write_request_s=max(self.write_request_s, self.write_latency_s / self.lanes),
            read_latency_s=self.read_latency_s,
            write_latency_s=self.write_latency_s,
            read_bytes_per_s=self.read_bytes_per_s,
            write_bytes_per_s=self.write_bytes_per_s,
            queue_depth=self.lanes,
        )


@dataclass(frozen=True)
class RotatingDisk(DeviceModel):
    """A hard disk: one head, which seeks, waits for the place to come round, and transfers.

    A place less than a track ahead of the head is waited for; any other is sought. A seek takes `settle_s` and the rest
    up to `full_seek_s` by the square root of the distance.

    Args:
        rotation_s: one turn.
        track_bytes: what passes under the head in one turn.
        capacity_bytes: the distance that a full seek crosses.
        jitter: seeks take up to this share more or less.
        sweeps: the head takes what is queued in ascending order and returns to the lowest place when nothing is ahead;
            otherwise it takes requests as they were submitted.
        queue_depth: requests that a host should keep queued.
    """

    rotation_s: float
    track_bytes: float
    capacity_bytes: float
    settle_s: float
    full_seek_s: float
    jitter: float = 0.0
    sweeps: bool = True
    queue_depth: int = 128

    @property
    def bytes_per_s(self) -> float:
        """The sequential rate."""
        return self.track_bytes / self.rotation_s

    @property
    def figures(self) -> DeviceFigures:
        # Records of one log lie close together: a short seek and half a turn.
        request_s = self.settle_s + self.rotation_s / 2
        return DeviceFigures(
            read_request_s=request_s,
            write_request_s=request_s,
            read_latency_s=request_s,
            write_latency_s=request_s,
            read_bytes_per_s=self.bytes_per_s,
            write_bytes_per_s=self.bytes_per_s,
            queue_depth=self.queue_depth,
        )


HDD = RotatingDisk(
    name="hdd",
    sync_s=12e-3,
    rotation_s=60 / 7200,
    track_bytes=1.5e6,
    capacity_bytes=4e12,
    settle_s=0.8e-3,
    full_seek_s=15e-3,
    jitter=0.1,
)
SATA = ParallelDevice(
    name="sata",
    sync_s=1e-3,
    lanes=32,
    read_latency_s=110e-6,
    write_latency_s=60e-6,
    read_request_s=1 / 95e3,
    write_request_s=1 / 60e3,
    read_bytes_per_s=540e6,
    write_bytes_per_s=480e6,
    jitter=0.3,
)
NVME = ParallelDevice(
    name="nvme",
    sync_s=0.2e-3,
    lanes=64,
    read_latency_s=80e-6,
    write_latency_s=20e-6,
    read_request_s=1 / 600e3,
    write_request_s=1 / 200e3,
    read_bytes_per_s=3.2e9,
    write_bytes_per_s=2.0e9,
    jitter=0.3,
)
NETWORK = ParallelDevice(
    name="network",
    sync_s=3e-3,
    lanes=128,
    read_latency_s=900e-6,
    write_latency_s=1.2e-3,
    read_request_s=1 / 16e3,
    write_request_s=1 / 16e3,
    read_bytes_per_s=250e6,
    write_bytes_per_s=250e6,
    jitter=0.5,
)
MODELS: dict[str, ParallelDevice | RotatingDisk] = {model.name: model for model in (NVME, SATA, HDD, NETWORK)}
"""The named devices."""
