"""Draft heads of tiny targets, and the numbers of the package speculators for one of them.

Run as a script, `python tests/support/tasks/draft_heads.py FILE` writes those numbers, in an environment that has
speculators (0.9.0) and this checkout on its path. It loads the head from our files, in float32.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ligertune.features.draft.draft_cache import DraftCache, run_head
from ligertune.features.draft.draft_config import DraftConfig, draft_config_of
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.files.draft_files import DraftTarget, write_draft_head
from ligertune.features.draft.target_states import StateCapture

STEPS = 3
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def fill(module: nn.Module) -> None:
    """Set all parameters to values that no random generator makes, so that every version of torch has the same."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            wave = torch.sin(0.37 * torch.arange(parameter.numel(), dtype=torch.float64) + number)
            base = 1.0 if parameter.ndim == 1 else 0.0  # weights of norms
            parameter.copy_((base + 0.3 * wave).view_as(parameter))


def spaced_ids(config: DraftConfig) -> Tensor:
    """Return a draft vocabulary (D,) with gaps: every third token."""
    return torch.arange(config.draft_vocab_size) * 3


def known_head() -> tuple[DraftHead, DraftTarget]:
    """Return a head without random numbers, and its target: a Llama of seven layers with scaled rotary embeddings."""
    from support.models.tiny_models import config_of

    text = config_of("llama", num_hidden_layers=7, rope_parameters=ROPE, architectures=["LlamaForCausalLM"])
    config = draft_config_of(text, draft_vocab_size=16)
    head = DraftHead(config, spaced_ids(config))
    fill(head)
    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    fill(embedding)
    return head, DraftTarget("target", text, embedding.weight.detach())


def known_rows() -> tuple[Tensor, Tensor]:
    """Return token ids (T,) and states (T - 1, 3E) of a text without random numbers."""
    ids = torch.arange(12) * 37 % 128
    states = torch.sin(0.11 * torch.arange(11 * 192, dtype=torch.float64)).float().view(11, 192)
    return ids, states


def logits_of_steps(head: DraftHead, embedding: Tensor, ids: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """Return logits of each step of training-time test, as the head's decoding computes them.

    Row i of step k reads token i + 1 + k, its own state of step k - 1, the keys of step 0 up to row i, and its own
    keys of later steps. Step k has T - 1 - k rows (the others have no token).
    """
    rows = len(states)
    padded = torch.cat([ids[1:], ids.new_zeros(steps)])
    visible = torch.ones(rows, rows, dtype=torch.bool).tril()
    hidden = head.combine(states)
    cache = DraftCache(head)
    found = []
    for step in range(steps):
        embedded = embedding[padded[step : step + rows]]
        hidden = run_head(head, cache, hidden, embedded, torch.arange(rows) + step, visible)
        found.append(head.logits(head.norm(hidden))[: rows - step])
        visible = torch.cat([visible, torch.eye(rows, dtype=torch.bool)], dim=1)
    return found


def fitted_head(model: PreTrainedModel, config: DraftConfig, draft_ids: Tensor | None, text: list[int]) -> DraftHead:
    """Return a head that has learnt one text of the model, so that chains of its drafts are accepted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = DraftHead(config, draft_ids)
    ids = torch.tensor(text)
    with torch.no_grad(), StateCapture(model, config.layer_ids) as capture:
        model(input_ids=ids[None])
        states = capture.take()[0, :-1]
    embedding = model.get_input_embeddings().weight.detach()
    place = torch.full((config.vocab_size,), -100).scatter(0, head.draft_ids(), torch.arange(config.draft_vocab_size))
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(60):
        steps = logits_of_steps(head, embedding, ids, states, STEPS)
        # row i of step k predicts token i + 2 + k; the last row has no target
        losses = [F.cross_entropy(one[:-1], place[ids[step + 2 :]]) for step, one in enumerate(steps)]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    return head.eval()


def record_speculators(path: Path) -> None:
    """Write the logits that speculators computes with our files of `known_head` on `known_rows`."""
    import speculators
    import transformers
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    head, target = known_head()
    ids, states = known_rows()
    with tempfile.TemporaryDirectory() as folder:
        whole = transformers.AutoModelForCausalLM.from_config(target.config)
        whole.save_pretrained(Path(folder) / "target")  # speculators opens it; the head's numbers do not depend on it
        target = DraftTarget(str(Path(folder) / "target"), target.config, target.embedding)
        files = Path(folder) / "head"
        write_draft_head(head, files, target, layout="speculators", speculative_tokens=STEPS)
        config = Eagle3SpeculatorConfig.from_pretrained(files)
        config.transformer_layer_config._attn_implementation = "eager"  # flex attention needs whole blocks of 128
        client = Eagle3DraftModel.from_pretrained(files, config=config, dtype=torch.float32).eval()
    seen: list[Tensor] = []
    client.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    tokens = ids[None, 1:]
    with torch.no_grad():
        client(hidden_states=states[None], input_ids=tokens, document_ids=torch.zeros_like(tokens), ttt_steps=STEPS)
    logits = [[[round(x, 7) for x in row] for row in one[: len(states) - k].tolist()] for k, one in enumerate(seen)]
    versions = {one.__name__: one.__version__ for one in (transformers, torch)}
    record = {
        "speculators": "0.9.0",
        **versions,
        "draft_ids": (client.d2t + torch.arange(16)).tolist(),
        "logits": logits,
    }
    assert Path(speculators.__file__).parent.with_name("speculators-0.9.0.dist-info").is_dir()
    path.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    record_speculators(Path(sys.argv[1]))
