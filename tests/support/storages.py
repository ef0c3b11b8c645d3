"""Record the storages that operations make: the bytes alive now, and the largest number so far."""

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class MadeStorages(TorchDispatchMode):
    """Record the storage of every tensor that an op returns, except those of the model's weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {StorageWeakRef(p.untyped_storage()).cdata for p in model.parameters()}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = function(*args, **(kwargs or {}))
        for tensor in given if isinstance(given, tuple | list) else (given,):
            if isinstance(tensor, torch.Tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                self.storages[storage.cdata] = (storage, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.alive())
        return given

    def alive(self) -> int:
        return sum(self.sizes())

    def sizes(self) -> list[int]:
        """Return the bytes of each storage that is alive now."""
        self.storages = {k: v for k, v in self.storages.items() if k not in self.weights and not v[0].expired()}
        return [size for _, size in self.storages.values()]
