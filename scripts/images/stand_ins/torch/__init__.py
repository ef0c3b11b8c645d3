"""Stands in for torch where an image is built and asked about itself: every name is there, and computes nothing."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AnyName(type):
    def __getattr__(cls, name: str) -> object:
        return _anything(name)


class Anything(metaclass=_AnyName):
    """Any attribute of torch: usable as a class, a function or a decorator."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __call__(self, *args: object, **options: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> object:
        return _anything(name)


def _anything(name: str) -> type[Anything]:
    if name.startswith("__"):  # Python's own questions get an honest answer
        raise AttributeError(name)
    return Anything


class _Submodule(ModuleType):
    def __getattr__(self, name: str) -> object:
        return _anything(name)


class _AnySubmodule:
    """An importer of torch.whatever."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("torch.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


__getattr__ = _anything
sys.meta_path.append(_AnySubmodule())

from torch import cuda, distributed, version  # noqa: E402

__version__ = "2.13.0"
cuda.is_available = distributed.is_available = lambda: False
version.hip = version.cuda = None
