"""Trained rows of embeddings and tied trained embeddings: as with PEFT alone, with the fused loss; merge and reload."""

import copy
import warnings

import peft
import pytest
import torch
import transformers
from support.models import tiny_models

from ligertune.errors import UserError
from ligertune.files.model_files import RECIPE_MODEL
from ligertune.models.adapters.lora import load_adapter, merged_model
from ligertune.models.shape import read_shape
from ligertune.models.trainable import apply_method
from ligertune.patching.deferred_logits import loss_counts
from ligertune.patching.patch import patch
from ligertune.planning.options import MethodOptions

LORA = {"type": "lora", "lora_r": 4, "lora_target_modules": ["q_proj"]}
TOKENS = {**LORA, "trainable_token_indices": [5, 17, 3]}
CASES = {
    "tokens": (TOKENS, "llama"),
    "tokens, tied": (TOKENS, "llama_tied"),
    "tokens, tied, scaled": (TOKENS, "gemma2"),
    "embedding and head": ({**LORA, "lora_modules_to_save": ["embed_tokens", "lm_head"]}, "llama"),
    "tied head": ({**LORA, "lora_modules_to_save": ["lm_head"]}, "llama_tied"),
    "tokens and a trained head": ({**TOKENS, "lora_modules_to_save": ["lm_head"]}, "llama"),
}


def pair(method: dict, family: str, device: str = "cpu"):
    """Return (our model, PEFT's by itself) with the same disturbed adapter."""
    plain = tiny_models.make(family).to(device)
    ours = copy.deepcopy(plain)
    patch(ours)
    ours = apply_method(ours, MethodOptions(**method), seed=1)
    config = copy.deepcopy(ours.peft_config["default"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        theirs = peft.get_peft_model(plain, config)
    generator = torch.Generator().manual_seed(3)
    for (name, a), (other, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (name, a.requires_grad) == (other, b.requires_grad)
        if a.requires_grad:
            a.data = a.data + (0.1 * torch.randn(a.shape, generator=generator)).to(device)
            b.data = a.data.clone()
    return ours.train(), theirs.train()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None].to(model.device)).logits


def compare_training(case: str, device: str = "cpu") -> None:
    ours, theirs = pair(*CASES[case], device)
    batch = tiny_models.batch(device=device)
    batch["input_ids"][:, ::3] = 17
    losses = []
    for model in (ours, theirs):
        losses.append(model(**batch, num_items_in_batch=31).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert (loss_counts(ours).fused, loss_counts(ours).materialised.total()) == (1, 0)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if a.requires_grad:
            assert b.grad.abs().max() > 0, name
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_they_train_as_with_peft_alone(case):
    compare_training(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_they_train_as_with_peft_alone_on_a_gpu(case):
    compare_training(case, "cuda")


@pytest.mark.parametrize("case", CASES)
def test_they_reload_in_peft_and_merge(case, tmp_path):
    ours, _ = pair(*CASES[case])
    expected, family = logits(ours), CASES[case][1]
    ours.save_pretrained(tmp_path, save_embedding_layers=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = peft.PeftModel.from_pretrained(tiny_models.make(family), tmp_path)
    assert (logits(tiny_models.make(family)) - expected).abs().max() > 0.05
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    again = load_adapter(tiny_models.make(family), str(tmp_path), RECIPE_MODEL)
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)
    merged = merged_model(ours)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    tied = merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    assert tied == ("tied" in case)


def test_the_plan_counts_them():
    lora, tokens, tied, whole = (
        read_shape(apply_method(tiny_models.make(family), MethodOptions(**method)))
        for method, family in ((LORA, "llama"), CASES["tokens"], CASES["tokens, tied"], CASES["embedding and head"])
    )
    vocab, hidden = lora.head.vocab, lora.head.hidden
    assert tokens.n_trainable - lora.n_trainable == 2 * 3 * hidden
    assert tied.n_trainable - lora.n_trainable == 3 * hidden
    assert whole.n_trainable - lora.n_trainable == 2 * vocab * hidden
    assert (tokens.head.token_rows, tokens.head.tied, tied.head.token_rows, tied.head.tied) == (True, False, True, True)
    assert not lora.head.token_rows and tokens.n_matmul_trainable < lora.n_matmul
    kinds = {kind.shape: kind for kind, _ in tokens.parameters if kind.trains and kind.shape == (3, hidden)}
    assert kinds[3, hidden].adapter and not kinds[3, hidden].inside


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(UserError, match=r"trainable_token_indices: 999 is no token: the embedding has \d+ rows"):
        apply_method(tiny_models.make("llama"), MethodOptions(**{**TOKENS, "trainable_token_indices": [999]}))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
    with pytest.raises(UserError, match="wte shares its weight"):
        method = {**LORA, "lora_target_modules": ["c_attn"], "lora_modules_to_save": ["wte"]}
        apply_method(gpt2, MethodOptions(**method))


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gemma2", "mixtral"])
def test_layers_that_train_in_full_are_float32_beside_a_bfloat16_model(family):
    """In bfloat16 a step of 1e-5 would leave most weights as they are. Hidden states stay bfloat16."""
    model = tiny_models.make(family).bfloat16()
    saved = ["embed_tokens", "lm_head"] if family == "llama" else ["lm_head", "gate"][: 1 + (family == "mixtral")]
    patch(model)
    ours = apply_method(model, MethodOptions(**LORA, lora_modules_to_save=saved), seed=1)
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert any("modules_to_save" in name for name in trained)
    before = {name: p.detach().clone() for name, p in trained.items() if "modules_to_save" in name}
    with torch.autocast("cpu", torch.bfloat16):
        output = ours(**tiny_models.batch(), output_hidden_states=True)
    assert {states.dtype for states in output.hidden_states} == {torch.bfloat16}
    output.loss.backward()
    torch.optim.SGD(trained.values(), lr=1e-5).step()
    for name, weight in before.items():
        moved = trained[name].grad != 0
        assert moved.any() and ((trained[name] != weight) == moved).float().mean() > 0.9, name
