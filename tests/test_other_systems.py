"""Imports on Windows, macOS and Python 3.10, without triton, and from a checkout with its folder `kernels/`."""

import ast
import functools
import sys
from pathlib import Path

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
import torch
import ligertune_kernels as K
assert K.backend("cpu") == K.backend("meta") == "reference"
x, w, y = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), torch.arange(4)
q, cos = x.view(1, 2, 2, 8), torch.ones(1, 2, 8)
outputs = [K.rms_norm(x, w[0]), *K.apply_rope(q, q, cos, cos), K.swiglu(x), K.geglu(x), K.cross_entropy(x, y)]
sum(t.sum() for t in [*outputs, K.linear_cross_entropy(x, w, y)]).backward()
assert x.grad.isfinite().all() and w.grad.isfinite().all()
from ligertune.cli.app import main
main()
"""


def test_every_module_imports_without_triton_references_run_and_the_doctor_says_so(tmp_path):
    done = run([sys.executable, "-c", EVERYTHING, "doctor"], cwd=tmp_path)
    assert done.code == 0 and "the PyTorch references" in done.out, done.err


@functools.cache
def files_of(folder: str) -> list[tuple[Path, ast.Module]]:
    """Return the files of a folder, each with its syntax tree of Python 3.10."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [(path, ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))) for path in paths]


@pytest.mark.parametrize("folder", ["ligertune", "kernels"])
def test_unix_modules_are_not_imported_at_module_level(folder):
    """`try` and functions may import them."""
    for path, tree in files_of(folder):
        for node in tree.body:
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
    for path, tree in files_of(folder):
        for node in ast.walk(tree):
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
