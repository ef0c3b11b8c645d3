"""Training of a tiny mixture of experts: it learns as a dense model does, and its report says how experts were used."""

import json
from pathlib import Path

import pytest
import transformers
from support.command_line import RECIPE
from support.quickstart_runs import ALPACA_ROWS, train, train_ranks

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "dense": transformers.LlamaConfig(**SIZES, intermediate_size=192),
    "mixture": transformers.MixtralConfig(  # two of four experts, half as wide: as many active parameters
        **SIZES, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
        output_router_logits=True, router_aux_loss_coef=0.01,
    ),
}  # fmt: skip


def saved(folder: Path, name: str) -> dict[str, object]:
    """Write a configuration, and return the settings of a run on random weights."""
    config = CONFIGS[name]
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder / f"{name}-model")
    return {
        "model.model_name_or_path": str(folder / f"{name}-model"),
        "model.init": "random",
        "model.tokenizer.path": str(RECIPE.parent / "stories260K"),
        "model.dtype": "float32",
    }


def test_a_mixture_learns_as_a_dense_model_and_uses_all_experts(tmp_path):
    reports = {}
    for name in CONFIGS:
        reports[name] = train(
            tmp_path / name,
            **{
                **saved(tmp_path, name),
                **ALPACA_ROWS,
                "data.max_length": 256,
                "data.val_split": 0.0,
                "data.train_on": "all",
                "train.max_steps": 40,
                "train.per_device_train_batch_size": 4,
                "train.gradient_accumulation_steps": 1,
                "train.learning_rate": 5e-3,
                "logging.logging_steps": 5,
            },
        )
    dense, mixture = reports["dense"], reports["mixture"]
    learned = {name: report.loss_before_training - report.loss_last for name, report in reports.items()}
    assert learned["dense"] > 3  # nats, of 6.2
    # the router's loss is a part of the mixture's, and an expert sees half of the tokens
    assert learned["mixture"] > 0.9 * learned["dense"]
    assert dense.experts is None and mixture.n_active < mixture.n_parameters
    written = json.loads((tmp_path / "mixture" / "run" / "report.json").read_text(encoding="utf-8"))["experts"]
    assert [layer["layer"] for layer in written["layers"]] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert all(layer["unused"] == 0 and layer["min"] > 0.02 for layer in written["layers"])
    logged = [
        json.loads(line) for line in (tmp_path / "mixture" / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    aux_losses = [line["aux_loss"] for line in logged if "grad_norm" in line]
    # 1 for each of the two chosen experts if the load is even
    assert len(aux_losses) == 8 and all(1.9 < value < 3 for value in aux_losses)
    assert written["auxiliary_loss"] == {"router_aux_loss_coef": 0.01} and written["dropped_tokens"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_have_the_losses_and_the_load_of_one_process(tmp_path, strategy):
    settings = {**saved(tmp_path, "mixture"), "train.gradient_checkpointing": True}
    alone = train_ranks(1, tmp_path / "one", **settings)
    both = train_ranks(2, tmp_path / "two", **settings, **{"parallel.strategy": strategy,
                                                           "train.gradient_accumulation_steps": 1})  # fmt: skip
    assert both == pytest.approx(alone, rel=1e-5)
    loads = [
        json.loads((tmp_path / run / "run" / "report.json").read_text("utf-8"))["experts"] for run in ("one", "two")
    ]
    assert loads[0] == loads[1]
