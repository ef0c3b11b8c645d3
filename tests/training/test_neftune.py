"""NEFTune: transformers' noise in padded rows, the document's own length in packed ones; resumes bit-exactly."""

import pytest
import torch
from command_line import losses, weights
from quickstart_runs import RESUME, saves, train, unfinished
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from ligertune.training.step import EmbeddingNoise

ALPHA, IDS = 5.0, torch.arange(24).view(2, 12)


def embeddings() -> tuple[nn.Embedding, nn.Embedding]:
    first, second = nn.Embedding(24, 16), nn.Embedding(24, 16)
    second.load_state_dict(first.state_dict())
    return first, second


def test_padded_rows_get_the_noise_of_transformers():
    ours, theirs = embeddings()
    noise = EmbeddingNoise(ours, ALPHA)
    theirs.neftune_noise_alpha = ALPHA
    theirs.register_forward_hook(neftune_post_forward_hook)
    torch.manual_seed(3)
    expected = theirs(IDS)
    torch.manual_seed(3)
    with noise.of_batch({"input_ids": IDS}):
        found = ours(IDS)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert ours(IDS).equal(theirs.eval()(IDS))  # none outside of a training batch
    with noise.of_batch({}):
        assert ours.eval()(IDS).equal(theirs(IDS))


def test_packed_documents_get_noise_by_their_own_length():
    embedding, plain = embeddings()
    noise = EmbeddingNoise(embedding, ALPHA)
    lengths = [4, 100, 400]
    ends = torch.tensor(lengths).cumsum(0)
    places = torch.stack((ends - torch.tensor(lengths), ends)).repeat_interleave(torch.tensor(lengths), dim=1)
    ids = torch.randint(0, 24, (1, sum(lengths)))
    with noise.of_batch({"document_places": places}):
        added = (embedding(ids) - plain(ids)).detach()[0].split(lengths)
    for values, length in zip(added, lengths, strict=True):
        bound = ALPHA / (length * 16) ** 0.5
        assert 0.9 * bound < values.abs().max() <= bound * 1.0001
        assert values.std() == pytest.approx(bound / 3**0.5, rel=0.15)


def test_a_run_has_noise(tmp_path):
    short = {"train.max_steps": 1, "data.val_split": 0}
    for name, alpha in (("noisy", 5), ("quiet", "null")):
        train(tmp_path / name, **short, **{"train.neftune_noise_alpha": alpha})
    assert losses(tmp_path / "noisy" / "run") != losses(tmp_path / "quiet" / "run")


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_a_run_with_noise_repeats_and_resumes_bit_exactly(packing, tmp_path):
    changes = {"train.neftune_noise_alpha": 5, "data.packing": packing, "train.max_steps": 4, **saves(2)}
    changes["train.lr_scheduler_type"] = "constant"
    train(tmp_path / "whole", **changes)
    train(tmp_path / "part", **{**changes, "train.max_steps": 3})
    unfinished(tmp_path / "part")
    assert train(tmp_path / "part", **changes, **RESUME).resumed_from == 2
    assert losses(tmp_path / "part" / "run") == losses(tmp_path / "whole" / "run")
    assert weights(tmp_path / "part" / "run") == weights(tmp_path / "whole" / "run")
