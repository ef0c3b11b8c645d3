"""train.torch_compile: the decoder layers are compiled, and the numbers stay."""

from __future__ import annotations

import pytest
import torch
from command_line import losses
from test_keys import read
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ligertune.decode.samples import answers_to
from ligertune.errors import UserError
from ligertune.models.compile import compile_layers
from ligertune.run import plan_for, run
from ligertune.train.distributed import start_accelerator
from ligertune.train.model_builder import trained_model

# rows of one length, and nothing to evaluate: a graph for the packing's check, one for training
SETTINGS = {"data.packing": True, "data.val_split": 0, "data.max_length": 256, "train.max_steps": 2}


def compiled_layers(quickstart, folder, **changes: object) -> int:
    """How many modules of a run's model are compiled."""
    job = plan_for(read(quickstart, folder, **changes))
    model, _ = trained_model(job.plan, job.config, start_accelerator(job.plan))
    return sum(module._compiled_call_impl is not None for module in model.modules())


def test_the_key_compiles_every_decoder_layer(quickstart, tmp_path):
    assert compiled_layers(quickstart, tmp_path / "off") == 0
    assert compiled_layers(quickstart, tmp_path / "on", **{"train.torch_compile": "true"}) == 5


def test_a_model_that_names_no_layers_is_refused():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=0,
                                         num_attention_heads=1))  # fmt: skip
    with pytest.raises(UserError, match="names no layers that could be compiled"):
        compile_layers(model)


@pytest.mark.parametrize(("packing", "multiple"), [(True, 512), (False, 64)])
def test_batches_of_compiled_layers_have_few_lengths(packing, multiple, quickstart, tmp_path):
    changes = {"data.packing": packing, "data.max_length": 500}
    usual = plan_for(read(quickstart, tmp_path, **changes)).plan.rows.multiple_of
    compiled = plan_for(read(quickstart, tmp_path, **changes, **{"train.torch_compile": True})).plan.rows.multiple_of
    assert (usual, compiled) == (16, multiple)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_graph_serves_packed_rows_of_any_documents(checkpointing, quickstart, tmp_path):
    """Rows differ in the number of their documents, in the longest, and in how many labels they have."""
    how = {**SETTINGS, "train.max_steps": 4, "train.per_device_train_batch_size": 3, "train.global_batch_size": 3,
           "data.datasets.0.max_samples": 60, "train.torch_compile": True,
           "train.gradient_checkpointing": checkpointing}  # fmt: skip
    job = plan_for(read(quickstart, tmp_path, **how))
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(job, lambda line: None)
    assert len(losses(tmp_path / "run")) == 4


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos() * 2


class Layers(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.slow
def test_eight_lengths_to_train_on_and_eight_to_evaluate_on_are_all_compiled():
    torch.compiler.reset()
    model = Layers()
    compile_layers(model)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length in range(2, 10):
            model(torch.ones(length, requires_grad=True)).sum().backward()
        for length in range(2, 10):
            with torch.no_grad():
                model(torch.ones(length))


def test_an_answer_is_written_without_a_graph_for_each_of_its_lengths(quickstart, tmp_path):
    job = plan_for(read(quickstart, tmp_path, **SETTINGS, **{"train.torch_compile": True}))
    model, _ = trained_model(job.plan, job.config, start_accelerator(job.plan))
    answer = answers_to(["Once upon a time"], job.tokenizer.tokenizer, job.prompt,
                        pad_token_id=job.tokenizer.pad_token_id)  # fmt: skip
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    (said,) = answer(model)
    assert said["answer"].strip() and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("determinism", ["true", "false"])
def test_compiled_layers_train_as_others_do(determinism, checkpointing, quickstart, tmp_path):
    """With full_determinism the mode is on where a compiled backward is made, or torch refuses to run it."""
    found = []
    for compiled in ("false", "true"):
        how = {"train.gradient_checkpointing": checkpointing, "train.full_determinism": determinism}
        job = plan_for(read(quickstart, tmp_path / compiled, **SETTINGS, **how, **{"train.torch_compile": compiled}))
        run(job, lambda line: None)
        found.append(losses(tmp_path / compiled / "run"))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
