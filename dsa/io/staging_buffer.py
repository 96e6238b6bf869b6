"""One half of the pinned double buffer: a host block, a device block, and which rows lie where in both."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa.io.cache import Frames, Rows
from dsa.io.devices import Device, Event
from dsa.io.jobs import Table
from dsa.io.kernels_on_rows import gather_records, scatter_records
from dsa.io.layout import round_up
from dsa.io.staged import Lease, StagedPiece, StageJob

_ALIGNMENT = 256
_LEAST_BYTES = 64 * 1024


class Phase(enum.Enum):
    """FREE -> FILLING -> READY -> LEASED -> DRAINING -> FREE; a batch given up goes back to FREE before its lease."""

    FREE = "free"
    FILLING = "filling"  # frames are gathered into the host block, the copy to the device is issued
    READY = "ready"  # all that the step will wait for has been issued
    LEASED = "leased"  # a step has its rows, and issues its update and the copy back
    DRAINING = "draining"  # the copy back is under way, then the records go to their frames


@dataclass(frozen=True)
class Region:
    """Where one table's records lie: `first_byte` on, side by side, in the order of `rows`."""

    table: Table
    rows: Rows
    frames: Frames
    first_byte: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its records."""
        return len(self.rows) * self.table.record.record_bytes


@dataclass(frozen=True)
class Part:
    """Rows of one table to update: their positions among the step's rows, and their places in the group's records."""

    table: int
    positions: NDArray[np.int64]
    at: NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Records of one size and dtype, side by side on the device, of one table or several.

    Args:
        numbers: [records, numbers in a record], the device block's own memory, to be updated in place.
    """

    numbers: Tensor
    parts: tuple[Part, ...]


class Buffer:
    """Blocks that grow to the largest batch so far, and what is in them. It keeps no order: double_buffer.py does."""

    def __init__(self, device: Device) -> None:
        self.phase = Phase.FREE
        self.job: StageJob | None = None
        self.regions: tuple[Region, ...] = ()  # replaced, never changed: another thread may look at them
        self.leases: list[Lease] = []
        self.turn = 0  # of filling: the smaller is the older
        self.source: Buffer | None = None  # the other buffer, where its rows are ahead of the frames read for this one
        self.issued = False  # the update is, and so `updated` has been recorded
        self.pinned = True
        self.copied: Event | None = None  # the last copy that touches the host block
        self.ready: Event | None = None
        self.updated: Event | None = None
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._block = self._host

    @property
    def device_bytes(self) -> int:
        """Size of the device block."""
        return self._block.nbytes

    @property
    def used(self) -> tuple[Tensor, Tensor]:
        """The used part of the host block, and of the device block."""
        last = self.regions[-1]
        end = last.first_byte + last.nbytes
        return self._host[:end], self._block[:end]

    def lay_out(self, tables: Sequence[Table], pieces: Sequence[StagedPiece]) -> None:
        """Give each piece its place, and make the blocks large enough; nothing that was issued uses them any more."""
        order = sorted(pieces, key=lambda piece: _kind(tables[piece.table]))
        regions: list[Region] = []
        end = 0
        for piece in order:
            table = tables[piece.table]
            if regions and _kind(regions[-1].table)[:2] != _kind(table)[:2]:
                end = round_up(end, _ALIGNMENT)
            regions.append(Region(table, piece.rows, piece.frames, end))
            end += regions[-1].nbytes
        self.make_room(end)
        self.regions = tuple(regions)

    def make_room(self, nbytes: int, least_bytes: int | None = None) -> int:
        """Have room for so many bytes of records, where the device has no more for half as many, and so on; how much
        there is. Nothing that was issued uses the blocks any more, and nothing in them is of use.

        Args:
            least_bytes: what there must be room for; None: all of it.

        Raises:
            torch.OutOfMemoryError: the device has no room for that; there are no blocks then.
        """
        if nbytes <= self._block.nbytes:
            return self._block.nbytes
        least = nbytes if least_bytes is None else least_bytes
        self._host = self._block = self._host[:0].clone()  # the memory may be what is lacking
        while True:
            for size in (block_bytes(nbytes), round_up(nbytes, _ALIGNMENT)):
                with contextlib.suppress(torch.OutOfMemoryError):
                    block = self._device.device_block(size)
                    host, self.pinned = self._device.host_block(size)
                    self._host, self._block = host, block  # both or none
                    return size
            if nbytes <= least:
                raise torch.OutOfMemoryError(f"the device has no {nbytes} bytes of memory for the records of a step")
            nbytes = max(nbytes // 2, least)

    def gather(self) -> None:
        """Copy the records from their frames to the host block."""
        for region in self.regions:
            gather_records(region.table.arena.words, region.frames, self._host_words(region))

    def scatter(self) -> None:
        """Copy what was leased from the host block to its frames."""
        regions = {region.table.number: region for region in self.regions}
        for lease in self.leases:
            region = regions[lease.table]
            scatter_records(self._host_words(region), lease.at, region.table.arena.words, lease.frames)

    def _host_words(self, region: Region) -> NDArray[Any]:
        part = self._host.numpy()[region.first_byte : region.first_byte + region.nbytes]
        return part.view(np.uint64).reshape(len(region.rows), region.table.record.record_bytes // 8)

    def records(self, region: Region) -> Tensor:
        """The region's records on the device, int64 [rows, words of a record]."""
        part = self._block[region.first_byte : region.first_byte + region.nbytes]
        return part.view(torch.int64).view(len(region.rows), region.table.record.record_bytes // 8)

    def groups(self) -> list[Group]:
        """What is leased, for the update: tables with records of one kind lie side by side and are one group."""
        leases = {lease.table: lease for lease in self.leases}
        groups: list[Group] = []
        together: list[Region] = []
        for region in (*self.regions, None):
            if together and (region is None or _kind(region.table)[:2] != _kind(together[0].table)[:2]):
                groups.append(self._group(together, leases))
                together = []
            if region is not None:
                together.append(region)
        return [group for group in groups if group.parts]

    def _group(self, regions: Sequence[Region], leases: dict[int, Lease]) -> Group:
        record = regions[0].table.record
        first, count = regions[0].first_byte, sum(len(region.rows) for region in regions)
        dtype = torch.float64 if record.dtype == "float64" else torch.float32
        raw = self._block[first : first + count * record.record_bytes]
        parts = []
        for region in regions:
            lease = leases.get(region.table.number)
            if lease is not None:
                before = (region.first_byte - first) // record.record_bytes
                parts.append(Part(lease.table, lease.positions, lease.at + before))
        return Group(raw.view(dtype).view(count, -1), tuple(parts))


def block_bytes(nbytes: int) -> int:
    """The size of a block that is made for so many bytes of records: it has room for a batch somewhat larger."""
    return round_up(max(nbytes + nbytes // 4, _LEAST_BYTES), _ALIGNMENT)


def _kind(table: Table) -> tuple[int, str, int]:
    return table.record.record_bytes, table.record.dtype, table.number
