"""Import a command of scripts/, whose name has no suffix, or a module below scripts/."""

import importlib
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

from support.command_line import ROOT

SCRIPTS = ROOT / "scripts"


def load_script(name: str) -> ModuleType:
    """Return a command as a module. Commands import the packages below scripts/."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    loader = SourceFileLoader(name, str(SCRIPTS / name))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # dataclasses look up their module there
    loader.exec_module(module)
    return module


def script_module(name: str) -> ModuleType:
    """Return a module below scripts/: "benchmarks.pages"."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return importlib.import_module(name)
