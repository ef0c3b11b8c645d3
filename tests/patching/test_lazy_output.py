"""Logits of a patched model in training: read in every way they equal those of the unpatched model, and flow back."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.models import tiny_models
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast

from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.patch import patch

pytestmark = pytest.mark.filterwarnings("ignore:the logits of a training step")


def pair(family: str = "gemma2"):
    """Return an unpatched model and its patched copy; gemma2 has a soft cap on its logits."""
    plain = tiny_models.make(family)
    patched = copy.deepcopy(plain)
    patch(patched)
    return plain, patched


READS = {
    "attribute": lambda output: output.logits,
    "key": lambda output: output["logits"],
    "get": lambda output: output.get("logits"),
    "index": lambda output: output[1],
    "slice": lambda output: output[1:][0],
    "to_tuple": lambda output: output.to_tuple()[1],
    "dict": lambda output: dict(output.items())["logits"] * 1.0,
    "getattr of a copy": lambda output: copy.copy(output).logits,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_logits_and_their_gradients_equal_those_of_the_unpatched_model(family, read):
    batch, gradients, found = tiny_models.batch(), [], []
    for model in pair(family):
        logits = READS[read](model(**batch))
        loss = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        found.append(logits.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    for gradient, expected in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_unread_logits_cost_nothing_and_the_loss_stays_fused():
    _, patched = pair()
    calls = []
    logits = patched.lm_head.logits
    patched.lm_head.logits = lambda hidden: calls.append(1) or logits(hidden)
    output = patched(**tiny_models.batch())
    assert output[0] is output.loss is output["loss"] and list(output)[:2] == ["loss", "logits"]
    assert isinstance(output, CausalLMOutputWithPast) and calls == []
    assert loss_counts(patched).fused == 1 and not loss_counts(patched).materialised


def test_a_tuple_has_logits_in_their_place():
    plain, patched = pair()
    found, expected = (model(**tiny_models.batch(), return_dict=False) for model in (patched, plain))
    assert len(found) == len(expected)
    torch.testing.assert_close(found[1].float() + 0, expected[1].float(), rtol=1e-4, atol=1e-5)


def test_logits_first_read_without_gradients_still_have_them():
    _, patched = pair()
    output = patched(**tiny_models.batch())
    with torch.no_grad():
        accuracy = output.logits.argmax(-1)
    assert accuracy.shape == (2, 24) and output.logits.requires_grad
    with torch.no_grad():
        assert not patched(**tiny_models.batch()).logits.requires_grad
    with torch.inference_mode():
        assert patched(**tiny_models.batch()).logits.shape[-1] == patched.config.vocab_size


def test_logits_of_other_weights_are_refused():
    _, patched = pair()
    output = patched(**tiny_models.batch())
    output.loss.backward()
    torch.optim.SGD(patched.parameters(), lr=1.0).step()
    with pytest.raises(RuntimeError, match=r"after the weights of the output head changed.*keep_logits=True"):
        output.logits  # noqa: B018


def test_an_output_is_pickled_with_its_logits():
    plain, patched = pair()
    with torch.no_grad():
        again = pickle.loads(pickle.dumps(patched(**tiny_models.batch())))
        expected = plain(**tiny_models.batch())
    assert type(again) is type(expected)
    torch.testing.assert_close(again.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_outputs_survive_accelerate_autocast_and_pytrees_unread():
    from accelerate.utils import convert_outputs_to_fp32

    plain, patched = pair("llama")
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(**tiny_models.batch()).logits
        output = patched(**tiny_models.batch())
    same = torch.utils._pytree.tree_map(lambda leaf: leaf, output)
    assert output.logits.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(same.logits, output.logits)
    patched.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(patched.forward))
    assert patched(**tiny_models.batch()).logits.dtype == torch.float32


class Reading(Trainer):
    """Compute the loss from labels and logits, in the three ways of transformers' documentation."""

    way = staticmethod(lambda outputs: outputs.logits)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        logits = self.way(outputs).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_that_reads_logits_trains_as_without_patch(bf16, tmp_path):
    batch = tiny_models.batch()
    rows = [{"input_ids": ids, "labels": ids.clone()} for ids in batch["input_ids"]]
    losses = []
    for number, model in enumerate(pair("llama")):
        options = TrainingArguments(
            output_dir=str(tmp_path / str(number)), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3,
            logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=bf16, disable_tqdm=True,
            eval_strategy="steps", eval_steps=2,
        )  # fmt: skip
        trainer = Reading(model, options, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2 if bf16 else 1e-4)


@pytest.mark.slow
def test_a_compiled_model_says_what_to_write():
    _, patched = pair("llama")
    compiled = torch.compile(patched, backend="eager", fullgraph=True)
    output = compiled(**tiny_models.batch())
    with pytest.raises(AttributeError, match="keep_logits=True"):
        output.logits.float()
    with pytest.raises(TypeError, match="keep_logits=True"):
        output.logits[..., :-1, :]
    torch._dynamo.reset()
