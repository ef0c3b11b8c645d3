"""The Python package: wrong arguments end in one sentence, reports print readably, and type checkers see the names."""

import ast
import importlib.resources

import pytest
import torch
from support.command_line import ROOT
from support.quickstart_runs import SHORT, train
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ligertune


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: ligertune.patch("x"), TypeError, r"patch: the model must be a torch.nn.Module, and is a str"),
        (lambda m: ligertune.patch(None), TypeError, "and is a NoneType"),
        (lambda m: ligertune.patch(type(m)), TypeError, "and is a type"),
        (lambda m: ligertune.patch(nn.Linear(3, 3)), ValueError, "Linear is no model of transformers and has no norm"),
        (lambda m: ligertune.patch(nn.Module()), ValueError, "Module is no model of transformers"),
        (lambda m: ligertune.patch(m, rope="yes"), TypeError, "patch: rope must be True or False, and is 'yes'"),
        (lambda m: ligertune.patch(m, norm=1), TypeError, "norm must be True or False, and is 1"),
        (lambda m: ligertune.patch(m, mlp=None), TypeError, "mlp must be True or False, and is None"),
        (lambda m: ligertune.patch(m, keep_logits="no"), TypeError, "keep_logits must be True or False"),
        (lambda m: ligertune.patch(m, loss="fused"), ValueError, "loss must be one of linear_cross_entropy, cross"),
        (lambda m: ligertune.patch(m, loss=False), ValueError, "loss must be one of .*, and is False"),
        (lambda m: ligertune.patch(m, recompute="mlp"), ValueError, "recompute must be True, False, 'norms' or 'mlps'"),
        (lambda m: ligertune.patch(m, recompute=[]), ValueError, "recompute must be .*, and is \\[\\]"),
        (lambda m: ligertune.unpatch("x"), TypeError, "unpatch: the model must be a torch.nn.Module, and is a str"),
        (lambda m: ligertune.loss_counts("x"), TypeError, "loss_counts: the model must be a torch.nn.Module"),
        (lambda m: ligertune.AutoModelForCausalLM.from_config(m.config, keep_logits=1), TypeError,
         "AutoModelForCausalLM: keep_logits must be True or False"),
        (lambda m: ligertune.AutoModelForCausalLM.from_pretrained("nowhere", keep_logits="yes"), TypeError,
         "AutoModelForCausalLM: keep_logits must be"),
        (lambda m: ligertune.load_recipe(3), TypeError, "load_recipe: path must be a path of a file, and is 3"),
        (lambda m: ligertune.load_recipe("r.yaml", "train.seed=1"), TypeError, "overrides must be a list of 'section"),
        (lambda m: ligertune.load_recipe("r.yaml", [3]), TypeError, "overrides must be a list of 'section"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_sentence_and_changes_nothing(call, error, words, model):
    before = [type(module) for module in model.modules()]
    with pytest.raises(error, match=words) as caught:
        call(model)
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == before


def test_the_report_of_patch_prints_one_line_for_each_kernel(model):
    report = ligertune.patch(model, rope=False)
    ligertune.unpatch(model)
    lines = str(report).splitlines()
    assert lines[0].startswith("kernels run on the PyTorch references" if not torch.cuda.is_available() else "kernels")
    by_kernel = {line.split()[0]: line for line in lines[1:]}
    assert by_kernel["rms_norm"].split()[1:3] == ["3", "replaced"]
    assert "0 replaced, " in by_kernel["apply_rope"] and "switched off" in by_kernel["apply_rope"]
    assert by_kernel.keys() == {row.kernel for row in report.rows}


def test_the_report_of_a_run_prints_in_a_few_lines(tmp_path):
    report = train(tmp_path, **{**SHORT, "train.max_steps": 2, "data.datasets.0.max_samples": 20})
    said = str(report)
    assert said.startswith("run completed: step 2 of 2\nloss ") and "Report(" not in said
    assert "of host memory, the whole process" in said or torch.cuda.is_available()
    assert f"model {report.model_path}" in said and len(said) < 1000 + sum(map(len, report.notes))


def test_both_packages_say_that_they_are_typed_and_type_checkers_see_every_name():
    for package in ("ligertune", "ligertune_kernels"):
        assert (importlib.resources.files(package) / "py.typed").is_file()
    tree = ast.parse((ROOT / "ligertune" / "__init__.py").read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {item.asname: node.module for node in guarded.body for item in node.names}
    assert seen == ligertune._WHERE
    assert {*seen, "__version__"} == set(ligertune.__all__)
