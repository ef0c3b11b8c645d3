"""Imports on Windows, macOS and Python 3.10, without triton, and from a checkout with its folder `kernels/`."""

import ast
import sys

import pytest
from support.command_line import ROOT, run

UNIX_ONLY = {"fcntl", "grp", "posix", "pwd", "pty", "resource", "termios"}
EVERYTHING = """
import importlib, importlib.util, pkgutil, sys
sys.modules["triton"] = None
left_out = ["ligertune.__main__"]
if importlib.util.find_spec("lm_eval") is None:  # an extra, whose class this module extends
    left_out.append("ligertune.decode.harness_lm")
import ligertune, ligertune_kernels
for package in (ligertune, ligertune_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name not in left_out:
            importlib.import_module(module.name)
from ligertune_kernels import backend, swiglu
import torch
assert backend("cpu") == "reference"
assert swiglu(torch.ones(2, 3), torch.ones(2, 3)).shape == (2, 3)
from ligertune.cli.app import main
main()
"""


def test_every_module_imports_without_triton_and_the_doctor_says_that_references_run(tmp_path):
    done = run([sys.executable, "-c", EVERYTHING, "doctor"], cwd=tmp_path)
    assert done.code == 0 and "the PyTorch references" in done.out, done.err


@pytest.mark.parametrize("folder", ["ligertune", "kernels"])
def test_unix_modules_are_not_imported_at_module_level(folder):
    """`try` and functions may import them."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not UNIX_ONLY & set(names), path


# names of the standard library that Python 3.10 does not have, as far as a reader of newer code would use them
NEWER = {
    "asyncio": {"Runner", "TaskGroup", "timeout"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"EnumType", "ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "itertools": {"batched"},
    "typing": {"LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack", "assert_never",
               "assert_type", "override", "reveal_type"},
}  # fmt: skip


@pytest.mark.parametrize("folder", ["ligertune", "kernels"])
def test_only_names_of_python_3_10_are_imported(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))):
            if isinstance(node, ast.ImportFrom):
                newer = NEWER.get(node.module, set()) & {alias.name for alias in node.names}
                assert not newer, path
            if isinstance(node, ast.Import):
                assert "tomllib" not in {alias.name for alias in node.names}, path


FROM_THE_ROOT = """
import sys
sys.path.insert(0, "")  # as with `python -c`: the current folder is searched first
import importlib.metadata as metadata
from transformers.utils import is_kernels_available
assert any(d.metadata["Name"] == "kernels" for d in metadata.distributions()) or not is_kernels_available()
from transformers import AutoModelForCausalLM, LlamaConfig
size = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
assert AutoModelForCausalLM.from_config(LlamaConfig(**size)).num_parameters() > 0
"""


@pytest.mark.slow
def test_transformers_does_not_take_our_folder_for_the_package_kernels():
    done = run([sys.executable, "-c", FROM_THE_ROOT], cwd=ROOT)
    assert done.code == 0, done.err
