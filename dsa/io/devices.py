"""What staging asks of an accelerator: memory, streams, copies, events. CUDA is one, late_device.py another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa.errors import ConfigError
from dsa.io.late_device import LateDevice

Stream = Any
Event = Any


class Device(Protocol):
    """Streams run what is issued to them in order, each for itself; only events order one after another.

    Attributes:
        into, out: the streams of copies to the device and of copies back.
    """

    into: Stream
    out: Stream

    def current(self) -> Stream:
        """The stream of the calling thread's own work: gradients come from it, and weights are read by it."""

    def host_block(self, nbytes: int) -> tuple[Tensor, bool]:
        """Zeroed uint8 memory of the host; whether it is pinned."""

    def device_block(self, nbytes: int) -> Tensor:
        """uint8 memory of the device, for use on all three streams.

        Raises:
            torch.OutOfMemoryError: the device has no more.
        """

    def upload(self, array: NDArray[np.int64]) -> Tensor:
        """The array on the device, for use by the work that `run` is running; the host does not wait."""

    def run(self, stream: Stream, work: Callable[[], None]) -> None:
        """Issue `work`, whose operations go to the stream.

        Raises:
            torch.OutOfMemoryError: the device has none left for what the work makes.
        """

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Issue a copy; the host does not wait for it."""

    def record(self, stream: Stream) -> Event:
        """An event that has happened when all that was issued to the stream so far has ended."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is issued to the stream from now on begins after the event."""

    def synchronize(self, event: Event) -> None:
        """The calling thread waits for the event."""

    def hurry(self) -> None:
        """Somebody waits for what was issued."""

    def finish_step(self) -> None:
        """The step has issued all it has to the current stream.

        Raises:
            Exception: what a piece of work has raised on the device.
        """

    def finish(self) -> None:
        """The calling thread waits for all that was issued."""

    def close(self) -> None:
        """Nothing more is issued."""


def pinned(source: Tensor) -> Tensor:
    """A copy of a tensor of the host in pinned memory of torch's own cache, which keeps it until what was issued from
    it is done; the tensor itself where the system gives no such memory: copies then make the host wait."""
    try:
        return source.pin_memory()
    except RuntimeError:
        return source


def host_memory(shape: int | Sequence[int], dtype: torch.dtype, *, pin: bool = True) -> tuple[Tensor, bool]:
    """Memory of the host, and whether it is pinned: where it is asked for, and the system gives such a range."""
    if pin:
        try:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True), True
        except RuntimeError:  # copies from and to it are then synchronous, and right
            pass
    return torch.empty(shape, dtype=dtype, device="cpu"), False


class CudaDevice:
    """A CUDA device: two streams of its own beside the user's current one; pinned host memory where it can be had.

    Launches and allocations are made with the device as the current one: the end of `torch.cuda.stream` makes the one
    before current again, and where a thread has chosen none that is device 0: a context would be made there for no use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self.into: Stream = torch.cuda.Stream(device)
            self.out: Stream = torch.cuda.Stream(device)

    def current(self) -> Stream:
        """The caller's current stream on the device."""
        return torch.cuda.current_stream(self._device)

    def host_block(self, nbytes: int) -> tuple[Tensor, bool]:
        """Pinned memory, or pageable where the system gives no such range."""
        block, is_pinned = host_memory(nbytes, torch.uint8)
        return block.zero_(), is_pinned

    def device_block(self, nbytes: int) -> Tensor:
        """Memory of the `into` stream: what is allocated there after it is freed is used there after it."""
        with torch.cuda.device(self._device), torch.cuda.stream(self.into):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def upload(self, array: NDArray[np.int64]) -> Tensor:
        """Through pinned memory."""
        return pinned(torch.from_numpy(array)).to(self._device, non_blocking=True)

    def run(self, stream: Stream, work: Callable[[], None]) -> None:
        """`work` is called now; its launches go to the stream."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.no_grad():
            work()

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """A non-blocking copy."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def record(self, stream: Stream) -> Event:
        """A new event at the stream's end; whoever waits for it sleeps, and does not spin."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """The device waits, the host does not."""
        stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        """Waits without the interpreter's lock."""
        event.synchronize()

    def hurry(self) -> None:
        """A device is as fast as it is."""

    def finish_step(self) -> None:
        """What comes next on the current stream comes after the step."""

    def finish(self) -> None:
        """Waits for the whole device."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Streams end with the object."""


def open_device(device: torch.device) -> Device:
    """Staging's view of a torch device.

    Raises:
        ConfigError: it is none that staging knows.
    """
    if device.type == "cuda":
        return CudaDevice(device)
    if device.type == "cpu":
        return LateDevice()
    raise ConfigError(f"staging knows CUDA devices and the CPU, not {device}: use staging='auto' or 'off'")
