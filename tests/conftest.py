"""What all tests share: torch's opinion on sparse invariants is settled, hypothesis has no clock, Ctrl-C interrupts."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# Torch warns once a process where nobody has chosen, and warnings are errors here.
torch.sparse.check_sparse_tensor_invariants.disable()
hypothesis.settings.register_profile("no-clock", deadline=None, print_blob=True)
hypothesis.settings.load_profile("no-clock")
# A shell starts what runs in the background with Ctrl-C ignored, and processes started by tests inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch without threads of its own: on small tables they only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
