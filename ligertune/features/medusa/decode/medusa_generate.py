"""`ligertune generate --medusa`: load a model and its Medusa heads, and decode with both."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from ligertune.decode.generate import SpeculativeText, choose_prompt, encode_prompt
from ligertune.decode.speculative.cached_text import eos_token_ids
from ligertune.decode.speculative.candidate_tree import Acceptance, CandidateTree, Greedy, Typical
from ligertune.errors import UserError
from ligertune.features.medusa.decode.tree_decoding import decode_with_heads
from ligertune.features.medusa.heads import NEEDS_PLAIN_HEAD
from ligertune.features.medusa.heads_files import HeadsConfig, base_model_of, base_of_heads, read_choices, read_heads
from ligertune.features.output_head import check_plain_head, logit_transform
from ligertune.models.load import hide_loading_bars
from ligertune.models.save import load_saved


def choose_acceptance(name: str, temperature: float) -> Acceptance:
    """Return the acceptance rule `greedy` or `typical`. Raises UserError if the temperature contradicts it."""
    if name == "greedy" and temperature > 0:
        raise UserError(
            f"--temperature {temperature:g} samples, and --acceptance greedy writes the most likely text.",
            hint="Add --acceptance typical, or leave the temperature out.",
        )
    if name == "typical" and temperature == 0:
        raise UserError(
            "--acceptance typical samples, and --temperature 0 does not.", hint="Write --temperature 0.7, for example."
        )
    return Greedy() if name == "greedy" else Typical(temperature)


def generate_with_heads(
    name: str,
    prompt: str,
    *,
    raw: bool,
    max_new_tokens: int,
    acceptance: Acceptance,
    seed: int,
    trust_remote_code: bool = False,
) -> SpeculativeText:
    """Generate an answer with the heads in folder `name`, or in its medusa/ if it is a run's. Raises UserError."""
    folder = Path(name).expanduser()
    if (folder / "medusa").is_dir():
        folder = folder / "medusa"
    config = HeadsConfig.read(folder)
    hide_loading_bars()
    base = base_model_of(folder, config)
    trained = base_of_heads(folder, config)
    model, tokenizer = load_saved(base, trust_remote_code=trust_remote_code, tokenizer=str(folder), base=trained)
    heads = read_heads(folder, check_plain_head(model, hint=NEEDS_PLAIN_HEAD).weight)
    text, ids = encode_prompt(tokenizer, prompt, choose_prompt(folder, raw=raw))
    tree = CandidateTree.from_paths(read_choices(folder, len(heads)), device=model.device)
    torch.manual_seed(seed)
    start = time.perf_counter()
    found = decode_with_heads(
        model,
        heads,
        logit_transform(model, hint=NEEDS_PLAIN_HEAD),
        [ids],
        tree,
        max_new_tokens=max_new_tokens,
        stop_at=eos_token_ids(model),
        acceptance=acceptance,
    )
    new = found.tokens[0]
    seconds = time.perf_counter() - start
    return SpeculativeText(
        prompt=text,
        text=str(tokenizer.decode(new, skip_special_tokens=True)),
        new_tokens=len(new),
        seconds=seconds,
        accepted_length=found.accepted_length,
        tokens_per_second=len(new) / seconds,
    )
