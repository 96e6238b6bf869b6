"""The thread beside training that stages: it fills free buffers with the next batches, and drains updated ones.

It gathers a batch's records from their frames and issues their copy to the device, ahead of the batch's step; and when
the copy back of what a step has updated has been made, it scatters the records to their frames.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from dsa.io.access import Access
from dsa.io.double_buffer import DoubleBuffer
from dsa.io.staged import StageJob
from dsa.io.staging_buffer import Buffer, Phase, Region

_log = logging.getLogger("dsa")


class StagingThread:
    """Fills and drains the buffers of one device, one at a time, filling first; it runs from `start` on.

    Args:
        latch: told of a failure in the background.
    """

    def __init__(self, buffers: DoubleBuffer, access: Access, latch: Callable[[BaseException], None]) -> None:
        self.paused = False  # nothing is staged ahead; what steps have updated is still drained
        self._buffers = buffers
        self._access = access
        self._latch = latch
        self._wanted = threading.Event()  # there may be something to do
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, where it has not yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="dsa-staging", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Look again at what there is to do; from any thread."""
        self._wanted.set()

    def stop(self, timeout_s: float) -> None:
        """End the thread, and close the device; what is under way is left."""
        self._stopped = True
        self._buffers.device.close()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _serve(self) -> None:
        while not self._stopped:
            self._wanted.clear()
            try:
                while not self._stopped and self._do_next():
                    pass
            except BaseException as error:
                if not self._stopped:
                    self._latch(error)
            self._wanted.wait()

    def _do_next(self) -> bool:
        """Fill a buffer or drain one; False where there is neither."""
        with self._access:
            self._buffers.sweep()
            buffer = None if self.paused else self._buffers.begin_fill()
            draining = None if buffer is not None else self._buffers.oldest(Phase.DRAINING)
        if buffer is not None:
            self._fill(buffer)
            return True
        if draining is not None:
            self._drain(draining)
            return True
        return False

    def _fill(self, buffer: Buffer) -> None:
        """FILLING -> READY, or FREE where the batch was given up meanwhile, or the device has no memory for it."""
        job, source = buffer.job, buffer.source
        if job is None:
            raise RuntimeError("a buffer is filled for a batch")
        before = source.regions if source is not None else ()
        try:
            self._stage(buffer, job, source, before)
        except torch.OutOfMemoryError as error:
            _log.info("a batch is not staged ahead, its step goes in parts: %s", error)
            with self._access:
                self._buffers.refuse(buffer)

    def _stage(self, buffer: Buffer, job: StageJob, source: Buffer | None, before: Sequence[Region]) -> None:
        self._buffers.copy_in(buffer, job.pieces)
        with self._access:
            self._buffers.staged.gathered(job)
            issued = buffer.source is not None and buffer.source.issued
            if job.unwanted:
                self._buffers.free(buffer)
                return
            if not issued:
                self._buffers.enter(buffer, Phase.READY)
                return
        if source is not None:  # it is not freed meanwhile: only this thread drains
            self._buffers.forward(source, before, buffer)
        with self._access:
            if job.unwanted:
                self._buffers.free(buffer)
            else:
                self._buffers.enter(buffer, Phase.READY)

    def _drain(self, buffer: Buffer) -> None:
        """DRAINING -> FREE."""
        self._buffers.device.synchronize(buffer.copied)
        if self._stopped:
            return
        buffer.copied = None
        buffer.scatter()
        with self._access:
            self._buffers.staged.back(buffer.leases)
            self._buffers.free(buffer)
