"""What commands must not import: torch takes a second on a fast machine, transformers' model classes two more.

All commands run in one process, which costs one import of torch. Each imports more than the one before it.
"""

import json
import sys

import pytest
from support.command_line import RECIPE, run

FORBIDDEN = {
    # packages that only some runs need
    "plan": ("peft", "datasets", "pyarrow", "pandas", "scipy", "sklearn", "matplotlib", "bitsandbytes", "torchao",
             "deepspeed", "wandb", "tensorboard", "torch._inductor.compile_fx", "transformers.trainer"),
}  # fmt: skip
# a tokenizer and a configuration: no model class, no kernel, no compiler, no training loop
FORBIDDEN["data"] = (*FORBIDDEN["plan"], "transformers.modeling_utils", "transformers.generation.utils",
                     "torch._dynamo", "torch._inductor", "triton", "ligertune_kernels", "ligertune.models.load",
                     "ligertune.planning.plan", "ligertune.training.loop", "ligertune.run")  # fmt: skip
FORBIDDEN["compare"] = (*FORBIDDEN["data"], "torch", "transformers", "accelerate", "numpy", "tokenizers",
                        "safetensors", "huggingface_hub")  # fmt: skip
FORBIDDEN["recipe check"] = FORBIDDEN["recipe keys"] = (*FORBIDDEN["compare"], "jinja2", "PIL")
FORBIDDEN["--help"] = (*FORBIDDEN["recipe check"], "pydantic", "yaml")

# `compare` starts its runs as processes of their own: what it imports itself is what this imports
CODE = """
import contextlib, importlib, io, json, sys
from ligertune.cli.app import app

forbidden, recipe = json.loads(sys.argv[1]), sys.argv[2]
sys.path.insert(0, sys.argv[3])
found = {}
for command in ("--help", "recipe keys", "recipe check", "compare", "data", "plan"):
    if command == "compare":
        for module in ("compare_files", "comparison", "side", "trial"):
            importlib.import_module(f"ligertune.compare.{module}")
    else:
        words = [*command.split(), *([recipe] if command in ("recipe check", "data", "plan") else [])]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                app(words)
        except SystemExit as done:
            assert not done.code, command
    found[command] = [module for module in forbidden[command] if module in sys.modules]
json.dump(found, sys.stdout)
"""


# what transformers imports from packages that may be installed
OPTIONAL = {"sklearn/metrics.py": "roc_curve = None", "scipy/optimize.py": "linear_sum_assignment = None"}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    for name, code in OPTIONAL.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        (path.parent / "__init__.py").touch()
        path.write_text(code, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def imported(packages, tmp_path_factory):
    command = [sys.executable, "-c", CODE, json.dumps(FORBIDDEN), str(RECIPE), str(packages)]
    done = run(command, cwd=tmp_path_factory.mktemp("imports"))
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("command", FORBIDDEN)
def test_a_command_imports_only_what_it_needs(imported, command):
    assert imported[command] == []


@pytest.mark.slow
def test_packages_that_transformers_has_found_before_are_not_hidden(packages, tmp_path):
    """As in a notebook that uses transformers first: its model classes then import what it has found."""
    code = "import sys; sys.path.insert(0, sys.argv[2]); from transformers.utils import is_scipy_available; "
    code += "assert is_scipy_available(); from ligertune.cli.app import app; app(['plan', sys.argv[1]])"
    done = run([sys.executable, "-c", code, str(RECIPE), str(packages)], cwd=tmp_path)
    assert done.code == 0, done.err
