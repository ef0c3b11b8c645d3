"""Methods that change how weights start, train or are saved: two ranks give the losses and the files of one."""

import pytest
from safetensors.torch import load_file
from support.quickstart_runs import train_ranks

LORA, DDP, FSDP = {"method.type": "lora"}, {"parallel.strategy": "ddp"}, {"parallel.strategy": "fsdp"}
WAYS = {
    "fused": {**LORA, **FSDP, "model.dtype": "bfloat16", "kernels.lora": True},
    "bfloat16": {**LORA, **FSDP, "model.dtype": "bfloat16", "train.gradient_checkpointing": True},
    "some layers, rslora": {
        **LORA, **FSDP, "kernels.lora": True, "method.layers_to_transform": "[0, 2]", "method.use_rslora": True,
    },
    "dora": {**LORA, **FSDP, "method.use_dora": True, "method.use_rslora": True},
    "dora in bfloat16": {**LORA, **FSDP, "method.use_dora": True, "model.dtype": "bfloat16"},
    "qlora, dora": {**DDP, "method.type": "qlora", "method.use_dora": True, "method.use_rslora": True},
    "loftq": {**DDP, "method.type": "qlora", "method.init_lora_weights": "loftq"},
    "qlora, pissa": {**DDP, "method.type": "qlora", "method.init_lora_weights": "pissa"},
    "pissa, rslora": {**LORA, **FSDP, "method.init_lora_weights": "pissa", "method.use_rslora": True},
    "pissa": {**LORA, **FSDP, "method.init_lora_weights": "pissa"},
    "learning rates": {
        **LORA, **FSDP, "method.loraplus_lr_ratio": 4, "train.lr_groups": "[{parameters: q_proj, learning_rate: 1e-5}]",
    },
    "tokens": {**LORA, **DDP, "method.trainable_token_indices": "[5, 7, 300]"},
    "tied embedding": {**LORA, **FSDP, "method.lora_modules_to_save": "[lm_head]"},
    "bfloat16 tied embedding": {
        **LORA, **FSDP, "method.lora_modules_to_save": "[lm_head]", "model.dtype": "bfloat16",
    },
    "added tokens": {**FSDP, "model.tokenizer.add_tokens": "[Below]"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_and_save_as_one(way, tmp_path):
    changes = WAYS[way]
    alone = {key: value for key, value in changes.items() if key != "parallel.strategy"}
    found = train_ranks(2, tmp_path / "two", **changes, **{"train.gradient_accumulation_steps": 1})
    assert found == pytest.approx(train_ranks(1, tmp_path / "one", **alone), rel=1e-5)
    for file in (tmp_path / "one" / "run" / "model").glob("*.safetensors"):
        one, two = load_file(file), load_file(tmp_path / "two" / "run" / "model" / file.name)
        assert one.keys() <= two.keys()
        assert all((one[name] - two[name]).abs().max() < 1e-5 for name in one)
