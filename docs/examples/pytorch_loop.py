"""Fine-tune a model in a plain PyTorch loop with ligertune's kernels.

From the root of the repository, with a tiny model on a CPU, or with a larger one on a GPU:

    python docs/examples/pytorch_loop.py
    python docs/examples/pytorch_loop.py Qwen/Qwen2.5-0.5B my_data.jsonl --learning-rate 2e-5 --steps 200

`--plain` trains without the kernels: the losses of every step are the same within rounding.
"""

import argparse
import json
from itertools import islice

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import ligertune

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_LENGTH, ACCUMULATION = 512, 2  # tokens of a row, micro-batches of a step


def tokenize(row, tokenizer):
    """Return the tokens of a row; the labels of its prompt are -100, which no loss is computed for."""
    prompt = tokenizer(f"{row['instruction']}\n{row['input']}\n")["input_ids"]
    answer = tokenizer(row["output"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    input_ids, labels = prompt + answer, [-100] * len(prompt) + answer
    return {"input_ids": input_ids[:MAX_LENGTH], "labels": labels[:MAX_LENGTH]}


def train(model, data, steps, learning_rate, plain):
    """Train for some steps, at most one epoch, and return the loss of each."""
    torch.manual_seed(0)  # the order of the rows
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(DEVICE).train()
    if not plain:
        print(*ligertune.patch(model).rows, sep="\n")
    with open(data, encoding="utf-8") as file:
        rows = [tokenize(json.loads(line), tokenizer) for line in file]
    batches = iter(DataLoader(rows, 4, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer), drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    losses = []
    while len(losses) < steps and (micro_batches := list(islice(batches, ACCUMULATION))):
        # The loss of a step is the mean over the trained tokens of all its micro-batches.
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
        total = 0.0
        for batch in micro_batches:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = model(**batch.to(DEVICE), num_items_in_batch=count).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        print(f"step {len(losses)}: loss {total:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="configs/quickstart/stories260K", help="folder or hub id")
    parser.add_argument("data", nargs="?", default="configs/quickstart/dolly_short.jsonl", help="JSON lines")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--plain", action="store_true", help="without the kernels")
    losses = train(**vars(parser.parse_args()))
