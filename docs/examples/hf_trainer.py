"""Fine-tune a model with Hugging Face's Trainer and ligertune's kernels.

From the root of the repository, with a tiny model on a CPU, or with a larger one on a GPU:

    python docs/examples/hf_trainer.py
    python docs/examples/hf_trainer.py Qwen/Qwen2.5-0.5B my_data.jsonl --learning-rate 2e-5 --steps 200

`--plain` trains without the kernels: the losses of every step are the same within rounding. On several GPUs,
start the script with `torchrun --nproc_per_node=N` or `accelerate launch`.
"""

import argparse
import json

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

import ligertune

MAX_LENGTH = 512


def tokenize(row, tokenizer):
    """Return the tokens of a row; the labels of its prompt are -100, which no loss is computed for."""
    prompt = tokenizer(f"{row['instruction']}\n{row['input']}\n")["input_ids"]
    answer = tokenizer(row["output"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    input_ids, labels = prompt + answer, [-100] * len(prompt) + answer
    return {"input_ids": input_ids[:MAX_LENGTH], "labels": labels[:MAX_LENGTH]}


def train(model, data, steps, learning_rate, plain):
    """Train for some steps and return the loss of each."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not plain:
        report = ligertune.patch(model)  # after PEFT, before the Trainer, DDP or FSDP wrap the model
        print(*report.rows, sep="\n")
    with open(data, encoding="utf-8") as file:
        dataset = Dataset.from_list([tokenize(json.loads(line), tokenizer) for line in file])
    arguments = TrainingArguments(
        output_dir="runs/hf_trainer",
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=learning_rate,
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), dataset)
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
