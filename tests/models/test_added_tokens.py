"""Added tokens: ids and rows, trained with every method, saved with tokenizer and model; refusals."""

import warnings

import pytest
import torch
from support.command_line import losses
from support.quickstart_runs import ALPACA_ROWS, RESUME, plan_run, recipe_for, saves, train, unfinished
from transformers import AutoModelForCausalLM, AutoTokenizer

from ligertune.errors import UserError
from ligertune.models.load import build_model
from ligertune.models.load_tokenizer import load_tokenizer
from ligertune.models.read_config import read_config
from ligertune.models.save import load_saved
from ligertune.training.checkpoint.export_check import check_export
from ligertune.training.checkpoint.export_run import plan_export

ADD = {"model.tokenizer.add_tokens": "[<plan>, Below]", "model.tokenizer.add_special_tokens": "['<|call|>']"}
LORA = {"method.type": "lora", "method.lora_target_modules": "[q_proj]", "train.max_steps": 2}
IDS = torch.tensor([[5, 512, 513, 514, 40]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_added_tokens_have_ids_and_are_found_in_text(tmp_path):
    tokenizer = load_tokenizer(recipe_for(tmp_path, **ADD).model).tokenizer
    assert tokenizer.new_token_ids == (512, 513, 514)
    assert tokenizer("a <plan>", add_special_tokens=False).input_ids[-1] == 512
    assert tokenizer.decode([512, 514], skip_special_tokens=True).strip() == "<plan>"
    pad = recipe_for(tmp_path, **ADD, **{"model.tokenizer.pad_token": "<|call|>"}).model
    assert load_tokenizer(pad).pad_token_id == 514
    known = recipe_for(tmp_path, **{"model.tokenizer.add_tokens": "[<s>]"}).model
    assert load_tokenizer(known).tokenizer.new_token_ids == ()


def test_the_plan_counts_their_rows(tmp_path):
    usual, grown = (plan_run(tmp_path, **ALPACA_ROWS, **LORA, **added).plan for added in ({}, ADD))
    assert grown.build.method.trainable_token_indices == (512, 513, 514)
    assert grown.n_trainable - usual.n_trainable == 3 * 64
    assert grown.n_parameters - usual.n_parameters == 2 * 3 * 64  # frozen rows, and the trained ones
    assert grown.data.tokens < usual.data.tokens  # Below is one token
    padded = plan_run(tmp_path, **ADD, **{"model.tokenizer.pad_to_multiple_of": 64}).plan
    assert padded.n_parameters - plan_run(tmp_path).plan.n_parameters == 64 * 64


def test_new_rows_are_those_of_the_seed_around_the_mean_of_the_old_ones(tmp_path):
    def rows(seed: int, **changes: object) -> torch.Tensor:
        spec = recipe_for(tmp_path, **ADD, **changes).model
        model = build_model(spec, read_config(spec), dtype=torch.float32, device="cpu", seed=seed)
        return model.get_input_embeddings().weight.detach()

    first, own = rows(3), rows(3, **{"model.tokenizer.mean_resizing": False})
    assert first.equal(rows(3)) and first[:512].equal(own[:512]) and not first.equal(rows(4))
    mean = first[:512].mean(0)
    assert (first[512:] - mean).abs().max() < 0.01 < (own[512:] - mean).abs().max()


def test_tokens_are_named_by_text_or_id(tmp_path):
    named = {**LORA, "method.trainable_token_indices": "['<s>', 7]"}
    assert plan_run(tmp_path, **named).plan.build.method.trainable_token_indices == (1, 7)
    for tokens, words in (("[zebra]", "no token 'zebra'.*"), ("[512]", "512 is no token")):
        with pytest.raises(UserError, match=f"method.trainable_token_indices: .*{words}"):
            plan_run(tmp_path, **{**named, "method.trainable_token_indices": tokens})
    freeze = {"method.type": "freeze", "method.trainable": "['layers.1']"}
    with pytest.raises(UserError, match="the embedding does not train, so their rows would stay random"):
        plan_run(tmp_path, **freeze, **ADD)


def test_an_adapter_with_added_tokens_loads_in_plain_peft(quickstart, tmp_path):
    from peft import PeftModel

    train(tmp_path, **LORA, **ADD)
    folder = tmp_path / "run" / "model"
    base = AutoModelForCausalLM.from_pretrained(quickstart / "stories260K")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base.resize_token_embeddings(len(tokenizer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        plain = PeftModel.from_pretrained(base, folder)
    assert tokenizer.convert_tokens_to_ids("<plan>") == 512
    ours, _ = load_saved(str(folder), trust_remote_code=False)
    torch.testing.assert_close(logits(ours), logits(plain), rtol=1e-4, atol=1e-4)
    plan = plan_export(str(tmp_path / "run"), tmp_path / "merged", adapter=False, checkpoint=None)
    plan.write()
    check_export(plan).raise_if_different()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == 515
    torch.testing.assert_close(logits(merged), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "lora, whole embedding"])
def test_a_run_with_added_tokens_resumes_bit_exactly(method, tmp_path):
    changes = {"train.max_steps": 6, "train.lr_scheduler_type": "constant", **saves(2), **ADD}
    changes |= {} if method == "full" else {"method.type": "lora"}
    changes |= {"method.lora_modules_to_save": "[embed_tokens]"} if "whole" in method else {}
    train(tmp_path / "whole", **changes)
    train(tmp_path / "part", **{**changes, "train.max_steps": 5})
    run, whole = unfinished(tmp_path / "part"), tmp_path / "whole" / "run"
    assert train(tmp_path / "part", **changes, **RESUME).resumed_from == 4
    assert losses(run) == losses(whole)
    names = [path.name for path in (run / "model").glob("*.safetensors")]
    assert names and all((run / "model" / n).read_bytes() == (whole / "model" / n).read_bytes() for n in names)
    for number, checkpoint in enumerate((None, "newest")):
        plan = plan_export(str(run), tmp_path / f"out{number}", adapter=False, checkpoint=checkpoint)
        plan.write()
        check_export(plan).raise_if_different()
    merged, tokenizer = load_saved(str(tmp_path / "out0"), trust_remote_code=False)
    assert merged.config.vocab_size == len(tokenizer) == 515
