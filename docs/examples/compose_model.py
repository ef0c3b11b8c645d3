"""A decoder made of ligertune's kernels, with the weights of a Llama or Qwen2 model (without scaled RoPE).

Documents lie in one flat row (T, E) without padding, and attention keeps them apart. From the root of the repository:

    python docs/examples/compose_model.py
    python docs/examples/compose_model.py Qwen/Qwen2.5-0.5B my_data.jsonl 200 2e-5  # model, data, steps, learning rate
"""

import json
import sys

import torch
from ligertune_kernels import (
    Documents,
    add_rms_norm,
    apply_rope,
    document_attention,
    linear_cross_entropy,
    rms_norm,
    swiglu,
)
from torch.nn.functional import embedding, linear
from transformers import AutoModelForCausalLM, AutoTokenizer

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def decoder_loss(p, config, documents):
    """Return the mean loss of the documents' tokens. p: the parameters, by their names in transformers."""
    eps, head_dim = config.rms_norm_eps, len(p["model.layers.0.self_attn.q_proj.weight"]) // config.num_attention_heads
    tokens, lengths = torch.cat(documents), torch.tensor([len(ids) for ids in documents], device=DEVICE)
    ends = lengths.cumsum(0).repeat_interleave(lengths)  # (T,): index after the last token of each token's document
    starts = ends - lengths.repeat_interleave(lengths)
    places = Documents(starts.int(), ends.int())
    labels = tokens.roll(-1).index_fill(0, lengths.cumsum(0) - 1, -100)  # a document's last token predicts nothing
    frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    angles = ((torch.arange(len(ends), device=DEVICE) - starts)[:, None] * frequencies).repeat(1, 2)[None]  # (1, T, D)
    residual = embedding(tokens, p["model.embed_tokens.weight"])  # (T, E)
    hidden = rms_norm(residual, p["model.layers.0.input_layernorm.weight"], eps)
    for i in range(config.num_hidden_layers):

        def project(x, name, at=f"model.layers.{i}."):
            return linear(x, p[f"{at}{name}_proj.weight"], p.get(f"{at}{name}_proj.bias"))

        q, k, v = (project(hidden, f"self_attn.{n}").unflatten(-1, (-1, head_dim)) for n in "qkv")  # (T, H or K, D)
        q, k = apply_rope(q.transpose(0, 1)[None], k.transpose(0, 1)[None], angles.cos(), angles.sin())
        q, k = q[0].transpose(0, 1), k[0].transpose(0, 1)
        out = project(document_attention(q, k, v, places).flatten(1), "self_attn.o")
        hidden, residual = add_rms_norm(out, residual, p[f"model.layers.{i}.post_attention_layernorm.weight"], eps)
        out = project(swiglu(project(hidden, "mlp.gate"), project(hidden, "mlp.up")), "mlp.down")
        weight = p.get(f"model.layers.{i + 1}.input_layernorm.weight", p["model.norm.weight"])
        hidden, residual = add_rms_norm(out, residual, weight, eps)
    return linear_cross_entropy(hidden, p.get("lm_head.weight", p["model.embed_tokens.weight"]), labels)


def train(name="configs/quickstart/stories260K", data="configs/quickstart/dolly_short.jsonl", steps=20, lr=1e-3):
    """Return transformers' loss of the first row of 8 documents, and the decoder's losses of all steps."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPE).to(DEVICE)
    with open(data, encoding="utf-8") as file:
        texts = ["{instruction}\n{input}\n{output}".format(**json.loads(line)) for line in file][: 8 * int(steps)]
    documents = [tokenizer(text, return_tensors="pt").input_ids[0].to(DEVICE) for text in texts]
    with torch.no_grad():
        sums = [model(ids[None], labels=ids[None]).loss * (len(ids) - 1) for ids in documents[:8]]
    losses, expected = [], float(sum(sums)) / sum(len(ids) - 1 for ids in documents[:8])
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), float(lr))
    for at in range(0, len(documents), 8):
        loss = decoder_loss(parameters, model.config, documents[at : at + 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        print(f"step {len(losses)}: loss {losses[-1]:.4f}; transformers, before the first step: {expected:.4f}")
    return expected, losses


if __name__ == "__main__":
    expected, losses = train(*sys.argv[1:])
