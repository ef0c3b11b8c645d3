"""The package in the folder above, for versions of `kernels` that look for it in a folder of its name."""

import importlib.util
import json
import sys
from pathlib import Path

_folder = Path(__file__).resolve().parent.parent
_name = json.loads((_folder / "metadata.json").read_text(encoding="utf-8"))["id"]
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _folder / "__init__.py")
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
globals().update({name: getattr(sys.modules[_name], name) for name in sys.modules[_name].__all__})
__all__ = sys.modules[_name].__all__
