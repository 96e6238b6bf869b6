"""What stands between the engine and its backend: it changes nothing but the wait for a device that answers nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import numpy as np
import pytest
from backend_rigs import DATA, PATIENCE_S, Faults, Rig, cancel_transfer, extents

from dsa.config import IOConfig
from dsa.errors import DeviceError
from dsa.io.backends.base import File
from dsa.io.backends.watched import WatchedBackend


@pytest.fixture
def backend(rig: Rig, faults: Faults) -> Iterator[WatchedBackend]:
    made = WatchedBackend(rig.make(IOConfig(), faults), PATIENCE_S)
    yield made
    faults.open_gates()
    made.shut_down(PATIENCE_S)


@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_transfer_ends_only_when_its_memory_is_at_rest(
    backend: WatchedBackend, file: File, faults: Faults, what: str, times: int
) -> None:
    buffer = await cancel_transfer(backend, file, faults, what, times)
    await backend.read(file, extents((200, 50, 0)), buffer)  # and it is as good as before
    assert np.array_equal(buffer[:50], DATA[200:250])


async def test_errors_come_through_as_they_are(backend: WatchedBackend, file: File, faults: Faults) -> None:
    def damaged() -> None:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        await backend.read(file, extents((0, 100, 0)), np.zeros(100, np.uint8), damaged)
    with pytest.raises(ValueError, match="damaged"):
        await backend.write(file, 0, np.zeros(100, np.uint8), damaged)
    with pytest.raises(ValueError, match="does not fit"):
        await backend.read(file, extents((0, 100, 0)), np.zeros(10, np.uint8))
    faults.errors[1000] = errno.EIO
    with pytest.raises(DeviceError) as caught:
        await backend.read(file, extents((900, 200, 0)), np.zeros(200, np.uint8))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(file.path))
