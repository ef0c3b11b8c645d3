"""Deferred logits: recorded operations, operations that compute the logits, and nested or parallel forwards."""

import copy
import operator
import threading
import warnings

import pytest
import torch
from support.models import tiny_models
from support.same_training import assert_same_training
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BartConfig, BartForCausalLM, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from ligertune.patching.deferred_logits import STATE, loss_counts, loss_only
from ligertune.patching.patch import patch

VOCAB = tiny_models.VOCAB


class TwistedLlama(LlamaForCausalLM):
    """A Llama that does `twist` to its logits before the loss."""

    def __init__(self, config, twist):
        super().__init__(config)
        self.twist = twist
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.constant = nn.Buffer(torch.tensor(4.0))

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.twist(self, self.lm_head(hidden))
        loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def twisted(twist):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = TwistedLlama(tiny_models.config_of("llama"), twist).train()
    patched = copy.deepcopy(plain)
    patch(patched)
    return patched, plain


def write_into(logits):
    logits[..., :5] = -1e4
    return logits


def divide_in_place(logits):
    logits.div_(2.0)
    return logits


RECORDED = {
    "nothing": lambda model, x: x,
    "divided": lambda model, x: x / 4,
    "multiplied": lambda model, x: 0.5 * (x * 3),
    "in place": lambda model, x: operator.itruediv(operator.imul(x, 2), 3),
    "cast": lambda model, x: x.float().contiguous().to(torch.float32),
    "cap": lambda model, x: torch.tanh(x / 3.0) * 3.0,
    "uneven cap": lambda model, x: (x * 5.0).tanh().to(dtype=torch.float32) * 2.0,
    "a constant tensor": lambda model, x: x / model.constant,
}
MATERIALISED = {
    "added": lambda model, x: x + 1.0,
    "subtracted from": lambda model, x: 1.0 - x,
    "sliced": lambda model, x: x[..., :VOCAB],
    "written into": lambda model, x: write_into(x),
    "divided in place": lambda model, x: divide_in_place(x),
    "divided in place, then scaled": lambda model, x: divide_in_place(x) * 2,
    "clamped": lambda model, x: x.clamp(max=0.1),
    "a torch function": lambda model, x: torch.log_softmax(x, dim=-1),
    "two caps": lambda model, x: x.tanh().tanh(),
    "a trained temperature": lambda model, x: x / model.temperature,
    "a vector": lambda model, x: x * torch.linspace(0.5, 2.0, VOCAB),
    "made twice": lambda model, x: x.mean() * 0 + x,
}


@pytest.mark.parametrize("twist", RECORDED.values(), ids=RECORDED)
def test_scaling_and_caps_are_recorded(twist):
    patched, plain = twisted(twist)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_training(patched, plain, tiny_models.batch(), num_items_in_batch=31)
    assert loss_counts(patched).fused == 1
    assert not loss_counts(patched).materialised


@pytest.mark.parametrize("twist", MATERIALISED.values(), ids=MATERIALISED)
def test_other_operations_compute_the_logits_and_warn_once(twist):
    patched, plain = twisted(twist)
    with pytest.warns(UserWarning, match="materialised logits") as caught:
        assert_same_training(patched, plain, tiny_models.batch())
        assert_same_training(patched, plain, tiny_models.batch(), num_items_in_batch=31)
    assert len([w for w in caught if "materialised" in str(w.message)]) == 1
    assert loss_counts(patched).fused == 0
    assert loss_counts(patched).materialised.total() == 2


def test_reading_shapes_computes_nothing():
    seen = {}

    def look(model, x):
        seen.update(shape=x.shape, size=x.size(-1), ndim=x.ndim, dim=x.dim(), dtype=x.dtype, device=x.device)
        return x.to(x.device)

    patched, _ = twisted(look)
    patched(**tiny_models.batch())
    shape = {"shape": (2, 24, VOCAB), "size": VOCAB, "ndim": 3, "dim": 3}
    assert seen == {**shape, "dtype": torch.float32, "device": torch.device("cpu")}
    assert loss_counts(patched).fused == 1


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest result of any op."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


@pytest.mark.parametrize(("loss", "made"), [("linear_cross_entropy", False), ("torch", True)])
def test_no_tensor_of_the_size_of_the_logits_is_made(loss, made):
    model = tiny_models.make("gemma2")
    patch(model, loss=loss)
    model.lm_head.requires_grad_(False)  # its gradient buffer, sized for large models, would hold all of these few rows
    batch = tiny_models.batch(rows=64, length=16)  # logits: 131072 elements; MLP: 98304; attention: 65536
    with Largest() as largest:
        model(**batch).loss.backward()
    assert (largest.numel >= 64 * 16 * VOCAB) is made


@pytest.fixture
def patched():
    model = tiny_models.make("gemma2")
    patch(model)
    return model


def test_evaluation_returns_logits(patched):
    batch = tiny_models.batch()
    output = patched.eval()(**batch)
    assert type(output.logits) is torch.Tensor
    assert output.logits.shape == output["logits"].shape == (2, 24, VOCAB)
    assert torch.equal(output.logits, patched(batch["input_ids"], attention_mask=batch["attention_mask"]).logits)


def test_logits_can_be_kept_in_training():
    plain, batch = tiny_models.make("gemma2"), tiny_models.batch()
    model = copy.deepcopy(plain)
    assert patch(model, keep_logits=True).rows[-1].kernel == "cross_entropy"
    assert_same_training(model, plain, batch, num_items_in_batch=31)
    found, expected = model(**batch).logits, plain(**batch).logits
    assert found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_loss_only_evaluation_computes_no_logits(patched):
    patched.eval()
    expected = patched(**tiny_models.batch()).loss
    with torch.no_grad(), loss_only():
        output = patched(**tiny_models.batch())
        without_labels = patched(tiny_models.batch()["input_ids"])
    assert output.logits is None
    assert torch.equal(output.loss, expected)
    assert without_labels.logits is not None
    assert patched(**tiny_models.batch()).logits is not None


def test_tuples_keep_their_places(patched):
    batch = tiny_models.batch()
    plain = tiny_models.make("gemma2").eval()
    found, expected = patched.eval()(**batch, return_dict=False), plain(**batch, return_dict=False)
    assert len(found) == len(expected)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def test_labels_may_be_positional(patched):
    batch = tiny_models.batch()
    given = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    assert torch.equal(patched(*given).loss, patched(**batch).loss)
    assert loss_counts(patched).fused == 2


def test_a_batch_without_a_trained_token_gives_zero_and_zero_gradients(patched):
    batch = tiny_models.batch()
    loss = patched(**{**batch, "labels": torch.full_like(batch["labels"], -100)}).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad.abs().max() == 0 for parameter in patched.parameters() if parameter.grad is not None)


def test_a_loss_set_by_the_user_is_called_with_logits(patched):
    patched.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.float().square().mean()
    with pytest.warns(UserWarning, match="materialised"):
        loss = patched(**tiny_models.batch()).loss
    expected = tiny_models.make("gemma2")(**tiny_models.batch()).logits.square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_an_exception_resets_the_state(patched):
    with pytest.raises(TypeError):
        patched(**tiny_models.batch(), cache_position="nowhere", attention_mask=1, input_ids=1)
    broken = tiny_models.batch()
    broken["labels"] = broken["labels"][:, :5]
    with pytest.raises((ValueError, RuntimeError)):
        patched(**broken)
    assert STATE.forward is None
    assert patched(tiny_models.batch()["input_ids"]).logits.shape == (2, 24, VOCAB)


class Outer(LlamaForCausalLM):
    """Call another causal model inside a labelled forward, as a distilled or guided model may."""

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        inner = self.inner[0](input_ids=input_ids, attention_mask=attention_mask)
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        trained = self.inner[0](input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        output.loss = output.loss + trained.loss + inner.logits.square().mean()
        return output


def test_nested_models_defer_only_their_own_logits():
    plain = Outer(tiny_models.config_of("llama")).train()
    plain.inner = [tiny_models.make("gemma2")]  # in a list: no submodule
    patched = copy.deepcopy(plain)
    patch(patched)
    patch(patched.inner[0])
    batch = tiny_models.batch()
    torch.testing.assert_close(patched(**batch).loss, plain(**batch).loss, rtol=1e-5, atol=0)
    assert loss_counts(patched).fused == loss_counts(patched.inner[0]).fused == 1
    assert not loss_counts(patched.inner[0]).materialised


def test_another_thread_gets_logits_while_a_loss_is_computed(patched):
    inside, done = threading.Event(), threading.Event()
    shapes = []

    def wait(module, args):
        inside.set()
        assert done.wait(timeout=20)

    def complete():
        assert inside.wait(timeout=20)
        hook.remove()
        shapes.append(patched(tiny_models.batch()["input_ids"]).logits.shape)
        done.set()

    hook = patched.model.layers[1].register_forward_pre_hook(wait)
    thread = threading.Thread(target=complete)
    thread.start()
    patched(**tiny_models.batch())
    thread.join()
    assert loss_counts(patched).fused == 1
    assert shapes == [(2, 24, VOCAB)]


class ColumnHead(nn.Linear):
    """Not a plain nn.Linear: its forward may compute anything."""


def with_column_head():
    model = tiny_models.make("llama")
    model.lm_head.__class__ = ColumnHead
    return model


def with_other_loss():
    model = tiny_models.make("llama")
    model.loss_function = lambda logits, labels, **kwargs: logits.mean()
    return model


def bart():
    sizes = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_layers": 1, "d_model": 64}
    return BartForCausalLM(BartConfig(vocab_size=VOCAB, decoder_ffn_dim=96, **sizes))


REFUSED = {
    "its forward computes the loss itself": bart,
    "ColumnHead, not a plain nn.Linear": with_column_head,
    "its loss is <lambda>": with_other_loss,
    "LlamaModel is not a transformers model with an output head": lambda: tiny_models.make("llama").model,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_loss_that_cannot_be_replaced_is_left_with_the_reason(reason):
    model = REFUSED[reason]()
    rows = {row.kernel: row for row in patch(model).rows}
    assert (rows["linear_cross_entropy"].applied, rows["linear_cross_entropy"].left) == (0, 1)
    assert reason in rows["linear_cross_entropy"].note
    assert sum(row.applied for kernel, row in rows.items() if kernel in ("rms_norm", "layer_norm")) >= 4
    model(input_ids=tiny_models.batch()["input_ids"])
