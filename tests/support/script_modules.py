"""Import a script of scripts/, whose name has no suffix, as a module."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

from command_line import ROOT


def load_script(name: str) -> ModuleType:
    loader = SourceFileLoader(name.removesuffix(".py"), str(ROOT / "scripts" / name))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # dataclasses look up their module there
    loader.exec_module(module)
    return module
