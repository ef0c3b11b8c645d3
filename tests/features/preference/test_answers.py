"""Log-probabilities of answers of whole models: an adapter on the head, switched on and off; models without kernels."""

import pytest
import torch
from support.models.tiny_models import make

from ligertune.features.preference.answers import answer_fields, answer_log_probs, train_on_chosen_prompts
from ligertune.features.preference.reference import without_adapter
from ligertune.models.shape import base_of
from ligertune.models.trainable import apply_method
from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.fused_loss import let_head_losses_run
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions

X = -100


def padded_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (4, 12), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[:, :4] = X
    labels[1, 9:] = X  # padding
    return {"input_ids": ids, "labels": labels}


def plain_log_probs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum log_softmax of the logits at the labels of each row."""
    with torch.no_grad():
        log_probs = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    found = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (found * (labels != X)).sum(1)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
def test_an_adapter_on_the_head_counts_unless_it_is_switched_off(kernels):
    model = make("llama")
    if kernels:
        patch(model)
    spec = MethodOptions(type="lora", lora_r=4, lora_target_modules=["q_proj", "lm_head"])
    model = apply_method(model, spec, fused=kernels)
    if not kernels:
        let_head_losses_run(base_of(model), "dpo")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batch = padded_batch()
    labelled = {**batch, **answer_fields(batch, 4)}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    on = plain_log_probs(model, batch)
    torch.testing.assert_close(answer_log_probs(model, labelled), on)
    with without_adapter(model):
        off = plain_log_probs(model, batch)
        torch.testing.assert_close(answer_log_probs(model, labelled), off)
    assert (on - off).abs().min() > 1e-3
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert bool(loss_counts(model).fused) == kernels and not loss_counts(model).materialised


def test_no_logits_are_made_for_log_probabilities_in_evaluation_mode():
    """Those of a reference, the model without its adapter: in bfloat16 and float32, 6 bytes per token and id."""
    model = make("llama").eval()
    patch(model)
    batch = padded_batch()
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits))
    answer_log_probs(model, {**batch, **answer_fields(batch, 4)})
    assert seen == [None]


def test_chosen_prompts_get_labels_that_do_not_count_as_answers():
    """Of the chosen rows, 0 and 2: all tokens but the first. Rejected rows stay as they are."""
    batch = padded_batch()
    fields = train_on_chosen_prompts(batch, answer_fields(batch, 4))
    assert torch.equal(fields["labels"][::2, 1:], batch["input_ids"][::2, 1:])
    assert (fields["labels"][::2, 0] == X).all() and torch.equal(fields["labels"][1::2], batch["labels"][1::2])
    assert torch.equal(fields["token_weights"], fields["answer_mask"].float())
    assert fields["answer_tokens"].tolist() == fields["answer_mask"].view(4, -1).sum(1).tolist() == [8, 5, 8, 8]
