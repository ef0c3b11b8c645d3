"""train.torch_compile: the decoder layers are compiled, few graphs are made, and the losses do not change."""

from functools import partialmethod

import pytest
import torch
from support.command_line import losses
from support.quickstart_runs import plan_run
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ligertune.decode.generate import SampleAnswers
from ligertune.errors import UserError
from ligertune.models.compile import compile_layers
from ligertune.run import run
from ligertune.training.build import trained_model
from ligertune.training.parallel.distributed import start_accelerator

# Rows of one length and no evaluation: one graph for the check of packing, one for training.
SETTINGS = {"data.packing": True, "data.val_split": 0, "data.max_length": 256, "train.max_steps": 2}


def compiled_layers(folder, **changes: object) -> int:
    """Count the compiled modules of a run's model."""
    job = plan_run(folder, **changes)
    model, _ = trained_model(job.plan, job.config, start_accelerator(job.plan))
    return sum(module._compiled_call_impl is not None for module in model.modules())


def test_the_key_compiles_every_decoder_layer(tmp_path):
    assert compiled_layers(tmp_path / "off") == 0
    assert compiled_layers(tmp_path / "on", **{"train.torch_compile": "true"}) == 5


def test_a_model_without_layers_is_refused():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=0,
                                         num_attention_heads=1))  # fmt: skip
    with pytest.raises(UserError, match="names no layers that could be compiled"):
        compile_layers(model)


@pytest.mark.parametrize(("packing", "multiple"), [(True, 512), (False, 64)])
def test_batches_are_padded_to_few_lengths(packing, multiple, tmp_path):
    changes = {"data.packing": packing, "data.max_length": 500}
    usual = plan_run(tmp_path, **changes).plan.rows.multiple_of
    compiled = plan_run(tmp_path, **changes, **{"train.torch_compile": True}).plan.rows.multiple_of
    assert (usual, compiled) == (16, multiple)


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_packed_rows_need_no_recompilation(checkpointing, tmp_path, monkeypatch):
    """The rows differ in their number of documents, the longest document, and the number of labels.

    Recompilation depends on the guards of dynamo. aot_eager saves half a minute of the C++ compiler.
    """
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    how = {**SETTINGS, "train.max_steps": 4, "train.per_device_train_batch_size": 3, "train.global_batch_size": 3,
           "data.datasets.0.max_samples": 60, "train.torch_compile": True,
           "train.gradient_checkpointing": checkpointing}  # fmt: skip
    job = plan_run(tmp_path, **how)
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(job, lambda line: None)
    assert len(losses(tmp_path / "run")) == 4


class Layers(nn.Sequential):
    _no_split_modules = ("Linear",)


@pytest.mark.slow
def test_eight_training_and_eight_evaluation_lengths_are_all_compiled():
    torch.compiler.reset()
    model = Layers(nn.Linear(4, 4))
    compile_layers(model)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length in range(2, 10):
            model(torch.ones(length, 4, requires_grad=True)).sum().backward()
        for length in range(2, 10):
            with torch.no_grad():
                model(torch.ones(length, 4))


def test_generation_does_not_compile_a_graph_per_length(tmp_path):
    job = plan_run(tmp_path, **SETTINGS, **{"train.torch_compile": True})
    model, _ = trained_model(job.plan, job.config, start_accelerator(job.plan))
    answer = SampleAnswers(["Once upon a time"], job.tokenizer.tokenizer, job.prompt)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    (said,) = answer(model)
    assert said["answer"].strip() and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("determinism", "checkpointing"), [("true", "false"), ("false", "true")])
def test_compiled_layers_have_the_same_losses(determinism, checkpointing, tmp_path):
    """torch refuses a compiled backward that was made without full_determinism's mode."""
    found = []
    for compiled in ("false", "true"):
        how = {"train.gradient_checkpointing": checkpointing, "train.full_determinism": determinism}
        job = plan_run(tmp_path / compiled, **SETTINGS, **how, **{"train.torch_compile": compiled})
        run(job, lambda line: None)
        found.append(losses(tmp_path / compiled / "run"))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
