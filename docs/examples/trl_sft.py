"""Fine-tune a model with TRL's SFTTrainer and ligertune's kernels (`pip install trl`).

From the root of the repository, with a tiny model on a CPU, or with a larger one on a GPU:

    python docs/examples/trl_sft.py
    python docs/examples/trl_sft.py Qwen/Qwen2.5-0.5B my_data.jsonl --learning-rate 2e-5 --steps 200

`--plain` trains without the kernels: the losses of every step are the same within rounding. On several GPUs,
start the script with `torchrun --nproc_per_node=N` or `accelerate launch`.
"""

import argparse
import json

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import ligertune


def prompt_and_completion(row):
    """Return a row in TRL's prompt and completion form; only the completion is trained."""
    return {"prompt": f"{row['instruction']}\n{row['input']}\n", "completion": row["output"]}


def train(model, data, steps, learning_rate, plain):
    """Train for some steps and return the loss of each."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not plain:
        # TRL computes the loss itself and reports the entropy of the logits, so only the layers are patched.
        print(*ligertune.patch(model, loss="torch").rows, sep="\n")
    with open(data, encoding="utf-8") as file:
        dataset = Dataset.from_list([prompt_and_completion(json.loads(line)) for line in file])
    config = SFTConfig(
        output_dir="runs/trl_sft",
        max_steps=steps,
        max_length=512,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=learning_rate,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(model, config, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="configs/quickstart/stories260K", help="folder or hub id")
    parser.add_argument("data", nargs="?", default="configs/quickstart/dolly_short.jsonl", help="JSON lines")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--plain", action="store_true", help="without the kernels")
    losses = train(**vars(parser.parse_args()))
