"""Sizes of models with a score head: parameters, FLOPs, memory by phase, and kernels."""

import pytest
import torch
import transformers
from support.models import tiny_models

import ligertune
from ligertune.models.adapters.lora import add_adapter
from ligertune.models.score_head import make_scored, score_head
from ligertune.models.shape import read_shape
from ligertune.planning.memory.activation_bytes import (
    ActivationPolicy,
    LayerStack,
    MicroBatch,
    StepBytes,
    loss_bytes,
    step_phases,
)
from ligertune.planning.options import MethodOptions

LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}  # fmt: skip
BATCH = MicroBatch(tokens=4096, labels=8, row_length=4096, accumulates=False)


def built(**sizes: object) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return a model that writes text and one that scores it, without weights."""
    config = transformers.LlamaConfig(**LLAMA, **sizes)
    with torch.device("meta"):
        writer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        make_scored(config, num_labels=3)
        scorer = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
    return writer, scorer


def test_the_score_head_is_small_and_its_loss_takes_no_memory():
    writer, scorer = map(read_shape, built())
    head = writer.head.elements
    assert scorer.n_parameters == writer.n_parameters - head + 3 * 2048
    assert scorer.n_matmul == writer.n_matmul - head and scorer.layer == writer.layer
    assert (writer.head.weights, scorer.head.weights, scorer.head.trained_weights) == (2, 1, 1)
    policies = [ActivationPolicy(fused_loss=fused) for fused in (True, False)]
    assert all(loss_bytes(writer.head, policy, BATCH, 2, None)[0] > 0 for policy in policies)
    step = StepBytes(itemsize=2, gradients=2 * scorer.n_parameters, optimizer_step=0, workspace=0)
    phases = step_phases(scorer.layer, scorer.head, ActivationPolicy(fused_loss=False), BATCH, step, LayerStack(2))
    assert [phase.loss for phase in phases if phase.name == "loss"] == [0]
    kinds = {kind.shape: kind for kind, _ in scorer.parameters}
    assert not kinds[(3, 2048)].inside and not kinds[(3, 2048)].quantised("qlora")


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_an_adapter_leaves_the_score_head_to_full_training(targets):
    _, scorer = built()
    adapted = add_adapter(scorer, MethodOptions(type="lora", lora_r=4, lora_target_modules=targets))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert [name for name in trained if "score" in name] == ["base_model.model.score.modules_to_save.default.weight"]
    assert all(".lora_" in name or "score" in name for name in trained)
    assert score_head(adapted.get_base_model()).weight.requires_grad
    assert adapted.peft_config["default"].task_type == "SEQ_CLS"
    shape = read_shape(adapted)
    assert shape.head.gives_scores and not shape.head.embedding_trains and shape.in_front == 0


def test_the_auto_class_runs_the_kernels():
    config = tiny_models.config_of("llama", num_labels=3)
    plain = tiny_models.random_model(transformers.AutoModelForSequenceClassification, config)
    model = ligertune.AutoModelForSequenceClassification.from_config(config)
    model.load_state_dict(plain.state_dict())
    ids = torch.arange(3, 30)[None]
    assert torch.allclose(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)
    assert any(hasattr(module, "patch_spec") for module in model.modules())
