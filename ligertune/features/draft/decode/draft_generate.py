"""`ligertune generate RUN --draft DRAFT`: the answer of a loaded model, drafted by its draft head."""

from __future__ import annotations

import time

import torch

from ligertune.decode.generate import Decoding, LoadedModel, SpeculativeText, encode_prompt
from ligertune.decode.speculative.cached_text import eos_token_ids
from ligertune.decode.speculative.candidate_tree import CandidateTree, chain
from ligertune.features.draft.decode.draft_decoding import TargetModel, decode_with_draft
from ligertune.features.draft.draft_head import DraftHead
from ligertune.features.draft.files.draft_files import head_folder, read_draft_head
from ligertune.features.output_head import logit_transform
from ligertune.models.score_head import embedding_of

NEEDS_PLAIN_HEAD = "A draft head needs a target with a linear output head without a bias, as in Llama."


def load_draft(name: str, loaded: LoadedModel) -> DraftHead:
    """Load the head in a folder, or in its folder draft/ if it is a run's, for a loaded target. Raises UserError."""
    weight = embedding_of(loaded.model).weight
    return read_draft_head(head_folder(name), loaded.model.config).to(weight.device, loaded.model.dtype).eval()


def generate_with_draft(
    loaded: LoadedModel, head: DraftHead, prompt: str, decoding: Decoding, *, draft_tokens: int, seed: int
) -> SpeculativeText:
    """Answer a prompt with chains of `draft_tokens` drafts. Raises UserError."""
    target = TargetModel(loaded.model, logit_transform(loaded.model, hint=NEEDS_PLAIN_HEAD))
    text, ids = encode_prompt(loaded.tokenizer, prompt, loaded.template)
    tree = CandidateTree.from_paths(chain(draft_tokens), device=loaded.model.device)
    torch.manual_seed(seed)
    start = time.perf_counter()
    found = decode_with_draft(
        target,
        head,
        ids,
        tree,
        max_new_tokens=decoding.max_new_tokens,
        stop_at=eos_token_ids(loaded.model),
        temperature=decoding.temperature,
        top_p=decoding.top_p,
    )
    seconds = time.perf_counter() - start
    return SpeculativeText(
        prompt=text,
        text=str(loaded.tokenizer.decode(found.tokens, skip_special_tokens=True)),
        new_tokens=len(found.tokens),
        seconds=seconds,
        accepted_length=found.accepted_length,
        tokens_per_second=len(found.tokens) / seconds,
    )
