"""What all tests share: torch's opinion on sparse invariants is settled, and hypothesis has no clock."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

# Torch warns once a process where nobody has chosen, and warnings are errors here.
torch.sparse.check_sparse_tensor_invariants.disable()
hypothesis.settings.register_profile("no-clock", deadline=None, print_blob=True)
hypothesis.settings.load_profile("no-clock")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch without threads of its own: on small tables they only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
