"""Compare `linear_cross_entropy` with torch on the hidden states of a model: loss, gradients, time, memory.

From the root of the repository, with a tiny model on a CPU (where the op runs its PyTorch reference), or on a GPU:

    python docs/examples/one_kernel.py
    python docs/examples/one_kernel.py Qwen/Qwen2.5-0.5B my_data.jsonl
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from ligertune_kernels import linear_cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def torch_loss(hidden, weight, labels):
    """Compute the loss from all logits (N, V) in float32, as transformers does."""
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def measure(loss_of, hidden, weight, labels):
    """Return the loss, the gradients of hidden and weight, and the seconds and GiB of a forward and a backward."""
    for _ in range(2):  # the first call compiles the kernels
        hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        loss = loss_of(hidden, weight, labels)
        loss.backward()
        loss = loss.item()  # waits for the GPU
        seconds = time.perf_counter() - begin
    gib = (torch.cuda.max_memory_allocated() - before) / 2**30 if DEVICE == "cuda" else float("nan")
    return loss, (hidden.grad, weight.grad), seconds, gib


def compare(model, data, rows):
    """Return the relative differences of the loss and of both gradients."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    model = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPE).to(DEVICE)
    hidden, labels = [], []
    with open(data, encoding="utf-8") as file, torch.no_grad():
        for row in map(json.loads, list(file)[:rows]):
            ids = tokenizer(f"{row['instruction']}\n{row['input']}\n{row['output']}", return_tensors="pt").input_ids
            hidden.append(model.base_model(ids.to(DEVICE)).last_hidden_state[0, :-1])
            labels.append(ids[0, 1:].to(DEVICE))  # the op takes labels that are already shifted
    inputs = torch.cat(hidden), model.get_output_embeddings().weight, torch.cat(labels)
    ours, theirs = (measure(loss_of, *inputs) for loss_of in (linear_cross_entropy, torch_loss))
    for name, (loss, _, seconds, gib) in {"ligertune": ours, "torch": theirs}.items():
        print(f"{name:>9}: loss {loss:.6f}, {1e3 * seconds:.2f} ms, {gib:.2f} GiB above the inputs")
    largest = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours[1], theirs[1], strict=True)]
    print(f"gradients differ by {largest[0]:.1e} and {largest[1]:.1e} of the largest (hidden states, weight)")
    return abs(ours[0] - theirs[0]) / theirs[0], *largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="configs/quickstart/stories260K", help="folder or hub id")
    parser.add_argument("data", nargs="?", default="configs/quickstart/dolly_short.jsonl", help="JSON lines")
    parser.add_argument("--rows", type=int, default=100)
    differences = compare(**vars(parser.parse_args()))
