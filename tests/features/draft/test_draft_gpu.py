"""Draft heads on a GPU: their kernels decode the text of plain decoding, up to near ties in bfloat16."""

import pytest
import torch
from support.tasks.draft_heads import fitted_head
from transformers import AutoModelForCausalLM, AutoTokenizer

from ligertune.decode.speculative.candidate_tree import CandidateTree, best_paths, chain
from ligertune.decode.speculative.plain_decoding import decode_plainly
from ligertune.features.draft.decode.draft_decoding import TargetModel
from ligertune.features.draft.decode.draft_measure import measure_draft, rank_shares
from ligertune.features.draft.draft_config import draft_config_of
from ligertune.features.output_head import logit_transform

pytestmark = pytest.mark.gpu

NEW = 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_text_is_that_of_plain_decoding(dtype, quickstart):
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    model = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K").eval()
    prompts = [tokenizer(words).input_ids for words in ("Once upon a time", "The dog", "One day, Lily")]
    text = prompts[0] + decode_plainly(model, prompts[0], NEW)
    head = fitted_head(model, draft_config_of(model.config), None, text).to("cuda", dtype)
    model = model.to("cuda", dtype)
    target = TargetModel(model, logit_transform(model))
    paths = best_paths(rank_shares(target, head, [text], depth=3), 16)
    for tree in (CandidateTree.from_paths(chain(3), device="cuda"), CandidateTree.from_paths(paths, device="cuda")):
        found = measure_draft(target, head, prompts, tree, max_new_tokens=NEW)
        near_ties = 0 if dtype == torch.float32 else found.near_ties
        assert found.identical + near_ties == found.prompts == 3
        assert found.accepted_length > 1.3
        sampled = measure_draft(target, head, prompts, tree, max_new_tokens=NEW, temperature=1.0)
        assert sampled.new_tokens == 3 * NEW
