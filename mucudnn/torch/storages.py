"""Which bytes a tensor lies in.

PyTorch has no public name for a storage: `data_ptr` is zero for tensors without data,
and `untyped_storage()` is another object every time.
"""

from collections.abc import Iterable

import torch

from mucudnn.passes.liveness import rounded

__all__ = ["bytes_in_storages", "storage_of"]


def storage_of(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory, with data or without.

    It may be another's as soon as no tensor has the memory any more.
    """
    return int(tensor.untyped_storage()._cdata)


def bytes_in_storages(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all that tensors lie in, each storage once, as an allocator has them."""
    storages = {storage_of(t): t.untyped_storage() for t in tensors}
    return sum(rounded(int(storage.nbytes())) for storage in storages.values())
