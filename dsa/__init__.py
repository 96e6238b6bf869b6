"""DSA: sparse Adam with its moments on disk, by the numbers of torch.optim.SparseAdam."""

from dsa.config import IOConfig
from dsa.optim.collating import collate_with_rows
from dsa.optim.sparse_adam import DiskSparseAdam

__all__ = ["DiskSparseAdam", "IOConfig", "collate_with_rows"]
