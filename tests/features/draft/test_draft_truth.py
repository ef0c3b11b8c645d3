"""Loss and gradients of a draft head against explicit loops in float64, and what it captures from its target."""

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ligertune.data.batching.collate import collate, collate_packed
from ligertune.data.examples import Example
from ligertune.features.draft.draft_config import draft_config_of
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.recipe import DraftSpec
from ligertune.features.draft.target_states import StateCapture
from ligertune.features.draft.training import draft_loss as draft_loss_module
from ligertune.features.draft.training.draft_model import DraftModel
from ligertune.features.output_head import LogitTransform
from ligertune.patching.patch import patch

STEPS = 3
DECAY = 0.8
DRAFT_IDS = (0, 2, 3, 7, 8, 11, 12, 14, 15)
# two documents with prompts that are not trained; a token that is not trained inside of an answer
DOCUMENTS = (([5, 1, 9, 2, 14, 3], [-100, -100, 9, 2, 14, 3]), ([4, 4, 12, 7, 0, 11, 8], [-100, 4, 12, -100, 0, 11, 8]))


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").double().eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.7)  # peaked distributions, whose argmax is at times outside of the drafts
    return model


def model_of(target, *, reduced: bool, num_layers: int = 1, recompute: bool = False, **options: object) -> DraftModel:
    torch.manual_seed(1)
    ids = torch.tensor(DRAFT_IDS) if reduced else None
    config = draft_config_of(target.config, draft_vocab_size=len(DRAFT_IDS) if reduced else None, num_layers=num_layers)
    spec = DraftSpec(steps=STEPS, decay_coefficient=DECAY, **options)
    head = DraftHead(config, ids).double()
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return DraftModel(target, head, spec, transform=LogitTransform(), recompute=recompute)


def batch_of(*, packed: bool) -> dict[str, object]:
    examples = [Example(torch.tensor(ids).numpy(), torch.tensor(labels).numpy(), "") for ids, labels in DOCUMENTS]
    if packed:
        batch = collate_packed(examples, pad_token_id=0, pad_to_multiple_of=16)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
            batch.pop(name)  # of flash attention and mixers; sdpa reads position_ids
        return batch
    return dict(collate(examples, pad_token_id=0))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean() + 1e-6).sqrt()


def rotated(x: Tensor, position: int) -> Tensor:
    """Rotate pairs (d, d + D / 2) of a head (D,) by position * 10000^(-2 d / D)."""
    half = len(x) // 2
    found = torch.zeros_like(x)
    for d in range(half):
        # float32, as models compute angles
        angle = torch.tensor(position, dtype=torch.float32) * torch.tensor(10000.0 ** (-2 * d / len(x)))
        cos, sin = angle.cos().double(), angle.sin().double()
        found[d] = x[d] * cos - x[d + half] * sin
        found[d + half] = x[d + half] * cos + x[d] * sin
    return found


def looped_layer(w: dict[str, Tensor], name: str, reads: list[Tensor], rows: list[dict], step: int) -> list[Tensor]:
    """Return a layer's output of each row. reads: inputs of the projections. rows: residual and keys of each row."""
    heads, key_heads, width = 4, 2, 4
    project = {part: w[f"{name}.self_attn.{part}_proj.weight"] for part in "qkvo"}
    for i, (inputs, row) in enumerate(zip(reads, rows, strict=True)):
        keys = (project["k"] @ inputs).view(key_heads, width)
        row["keys"].append([rotated(key, i + step) for key in keys])
        row["values"].append(list((project["v"] @ inputs).view(key_heads, width)))
    outputs = []
    for i, (inputs, row) in enumerate(zip(reads, rows, strict=True)):
        attended = []
        for h, query in enumerate((project["q"] @ inputs).view(heads, width)):
            query, group = rotated(query, i + step), h // (heads // key_heads)
            seen = [(rows[j]["keys"][0][group], rows[j]["values"][0][group]) for j in range(i + 1)]
            seen += [(row["keys"][m][group], row["values"][m][group]) for m in range(1, step + 1)]
            weights = torch.stack([query @ key / math.sqrt(width) for key, _ in seen]).softmax(0)
            attended.append(sum(weight * value for weight, (_, value) in zip(weights, seen, strict=True)))
        after = row["residual"] + project["o"] @ torch.cat(attended)
        normed = rms(after, w[f"{name}.post_attention_layernorm.weight"])
        gate, up = w[f"{name}.mlp.gate_proj.weight"] @ normed, w[f"{name}.mlp.up_proj.weight"] @ normed
        outputs.append(after + w[f"{name}.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up))
    return outputs


def looped_loss(model: DraftModel, kind: str) -> tuple[Tensor, list[list[float]]]:
    """Return the loss by loops over documents, steps, rows and tokens, and the acceptance of each row by step."""
    w = dict(model.draft_head.named_parameters())
    drafted = list(range(16)) if model.draft_head.d2t is None else list(DRAFT_IDS)
    embedding = model.base_model.get_input_embeddings().weight
    losses: list[list[Tensor]] = [[] for _ in range(STEPS)]
    accepted: list[list[float]] = [[] for _ in range(STEPS)]
    for ids, labels in DOCUMENTS:
        with torch.no_grad():
            found = model.base_model(torch.tensor([ids]), output_hidden_states=True)
        states = torch.cat([found.hidden_states[layer][0] for layer in (1, 2, 3)], -1)
        hidden = [w["fc.weight"] @ state for state in states]
        names = ["midlayer", *(f"layers.{n}" for n in range(1, model.draft_head.config.num_layers))]
        caches = {name: [{"keys": [], "values": []} for _ in ids] for name in names}
        for step in range(STEPS):
            for name in names:
                reads = []
                for i in range(len(ids)):
                    caches[name][i]["residual"] = hidden[i]
                    normed = rms(
                        hidden[i], w[f"{name}.{'hidden_norm' if name == 'midlayer' else 'input_layernorm'}.weight"]
                    )
                    if name == "midlayer":
                        token = ids[i + 1 + step] if i + 1 + step < len(ids) else 0  # of no row that counts
                        normed = torch.cat([rms(embedding[token], w["midlayer.input_layernorm.weight"]), normed])
                    reads.append(normed)
                hidden = looped_layer(w, name, reads, caches[name], step)
            for i in range(len(ids) - 2 - step):
                if labels[i + 2 + step] == -100:
                    continue
                z = found.logits[0, i + 1 + step]
                p = z.softmax(0)
                q = (w["lm_head.weight"] @ rms(hidden[i], w["norm.weight"])).softmax(0)
                alpha = sum(torch.minimum(p[token], q[d]) for d, token in enumerate(drafted))
                accepted[step].append(float(alpha.detach()))
                p_drafted = p[drafted] / p[drafted].sum()
                if kind == "acceptance":
                    losses[step].append(-alpha.log())
                elif kind == "kl":
                    losses[step].append((p_drafted * (p_drafted.log() - q.log())).sum())
                else:
                    inside = int(z.argmax()) in drafted
                    losses[step].append(-(p_drafted * q.log()).sum() if inside else 0.0 * q.sum())
    loss = sum(DECAY**step * torch.stack(of_step).sum() / len(of_step) for step, of_step in enumerate(losses))
    return loss, accepted


@pytest.mark.parametrize(
    "reduced, kind, packed, num_layers",
    [
        (True, "eagle", True, 1),
        (True, "kl", True, 1),
        (True, "acceptance", True, 1),
        (False, "eagle", False, 1),
        (False, "acceptance", True, 2),
    ],
)
def test_loss_and_gradients_are_those_of_explicit_loops(target, monkeypatch, reduced, kind, packed, num_layers) -> None:
    monkeypatch.setattr(draft_loss_module, "CHUNK_BYTES", 4 * STEPS * 16 * 3)  # three rows at a time
    model = model_of(target, reduced=reduced, loss=kind, num_layers=num_layers)
    expected, accepted = looped_loss(model, kind)
    names, leaves = zip(*model.draft_head.named_parameters(), strict=True)
    wanted = torch.autograd.grad(expected, leaves)
    found = model(**batch_of(packed=packed), use_cache=False)
    torch.testing.assert_close(found.loss, expected, rtol=1e-10, atol=1e-10)
    assert found.counts.tolist() == [len(of_step) for of_step in accepted]
    means = [sum(of_step) for of_step in accepted]
    torch.testing.assert_close(found.accepted, torch.tensor(means, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    for name, one, other in zip(names, torch.autograd.grad(found.loss, leaves), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_argmax_outside_of_the_draft_vocabulary_occurs_in_these_rows(target) -> None:
    """Otherwise the loss `eagle` would not be tested on rows that it leaves out."""
    outside = 0
    for ids, labels in DOCUMENTS:
        likeliest = target(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        outside += sum(likeliest[i - 1] not in DRAFT_IDS for i in range(2, len(ids)) if labels[i] != -100)
    assert outside > 0


def test_rows_found_by_the_collator_and_recomputed_layers_change_nothing(target) -> None:
    batch = batch_of(packed=True)
    results = []
    for recompute, rows in ((False, None), (True, torch.tensor([0, 1, 2, 3, 4, 6, 7, 9, 10, 11, 12]))):
        model = model_of(target, reduced=True, recompute=recompute)
        found = model(**batch, labelled_rows=rows, use_cache=False)
        results.append([found.loss, *torch.autograd.grad(found.loss, list(model.draft_head.parameters()))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_micro_batches_divided_by_the_labels_of_the_global_batch_have_its_gradients(target) -> None:
    model = model_of(target, reduced=True)
    leaves = list(model.draft_head.parameters())
    whole = model(**batch_of(packed=False), use_cache=False)
    counts = whole.counts.tolist()
    wanted = torch.autograd.grad(whole.loss, leaves)
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    batch = batch_of(packed=False)
    for row in range(2):
        part = {name: value[row : row + 1] for name, value in batch.items()}
        loss = model(**part, num_items_in_batch=counts, use_cache=False).loss
        sums = [total + grad for total, grad in zip(sums, torch.autograd.grad(loss, leaves), strict=True)]
    for one, other in zip(sums, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("patched", [False, True], ids=["torch", "patched"])
def test_captured_states_are_those_of_output_hidden_states(patched) -> None:
    """Entry k of hidden_states enters layer k; a head that reads the state after the layer fails silently."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=9, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.tensor([[3, 9, 1, 30, 8]])
    layers = draft_config_of(config).layer_ids
    assert layers == (2, 4, 6)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
        if patched:
            patch(model)
        with StateCapture(model, layers) as capture:
            last = model.model(ids, use_cache=False)[0]
            states = capture.take()
    torch.testing.assert_close(states, torch.cat([expected[layer] for layer in layers], -1))
    torch.testing.assert_close(last, expected[-1])
