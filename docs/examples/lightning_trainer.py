"""Fine-tune a model with Lightning and ligertune's kernels (`pip install lightning`).

From the root of the repository, with a tiny model on a CPU, or with a larger one on a GPU:

    python docs/examples/lightning_trainer.py
    python docs/examples/lightning_trainer.py Qwen/Qwen2.5-0.5B my_data.jsonl --learning-rate 2e-5 --steps 200

`--plain` trains without the kernels: the losses of every step are the same within rounding.
"""

import argparse
import json

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import ligertune

MAX_LENGTH = 512


class FineTuning(lightning.LightningModule):
    def __init__(self, model, learning_rate):
        super().__init__()
        self.model, self.learning_rate, self.losses = model.train(), learning_rate, []

    def training_step(self, batch):
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.learning_rate)


def tokenize(row, tokenizer):
    """Return the tokens of a row; the labels of its prompt are -100, which no loss is computed for."""
    prompt = tokenizer(f"{row['instruction']}\n{row['input']}\n")["input_ids"]
    answer = tokenizer(row["output"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    input_ids, labels = prompt + answer, [-100] * len(prompt) + answer
    return {"input_ids": input_ids[:MAX_LENGTH], "labels": labels[:MAX_LENGTH]}


def train(model, data, steps, learning_rate, plain):
    """Train for some steps and return the loss of each."""
    lightning.seed_everything(0)  # the order of the rows
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not plain:
        print(*ligertune.patch(model).rows, sep="\n")  # before Lightning wraps the model
    with open(data, encoding="utf-8") as file:
        rows = [tokenize(json.loads(line), tokenizer) for line in file]
    module = FineTuning(model, learning_rate)
    options = {"precision": "bf16-mixed" if torch.cuda.is_available() else "32-true", "gradient_clip_val": 1.0}
    trainer = lightning.Trainer(devices=1, max_steps=steps, logger=False, enable_checkpointing=False, **options)
    trainer.fit(module, DataLoader(rows, 8, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer)))
    return module.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="configs/quickstart/stories260K", help="folder or hub id")
    parser.add_argument("data", nargs="?", default="configs/quickstart/dolly_short.jsonl", help="JSON lines")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--plain", action="store_true", help="without the kernels")
    losses = train(**vars(parser.parse_args()))
