"""Small random models of each vision family, as folders with weights, tokenizer, template and image processor.

The tokenizers are byte-level BPE with the special tokens of the family. The templates are shortened from the published
ones and keep the parts of a turn, the order of images, BOS and the end of a turn.
"""

from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ligertune.data.modalities.image.reader import ImageReader, load_reader
from ligertune.data.modalities.image.recipe import VisionSpec
from ligertune.planning.options import ModelOptions
from support.models.tiny_models import random_model

QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MLLAMA_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] | trim }}{%- else %}"
    "{%- for content in message['content'] %}{%- if content['type'] == 'image' %}{{- '<|image|>' }}"
    "{%- elif content['type'] == 'text' %}{{- content['text'] | trim }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
LLAVA_TEMPLATE = (  # takes parts only; the images of a turn come first
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{%- for message in messages %}{%- set role = 'model' if message['role'] == 'assistant' else "
    "message['role'] %}{{ '<start_of_turn>' + role + '\n' }}{%- if message['content'] is string %}"
    "{{ message['content'] | trim }}{%- else %}{%- for item in message['content'] %}{%- if item['type'] == 'image' %}"
    "{{ '<start_of_image>' }}{%- elif item['type'] == 'text' %}{{ item['text'] | trim }}{%- endif %}{%- endfor %}"
    "{%- endif %}{{ '<end_of_turn>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}"
    "{%- endif %}"
)
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
         "<|video_pad|>")  # fmt: skip
_LLAMA3 = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|finetune_right_pad_id|>")
_GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
          "<image_soft_token>")  # fmt: skip

# family -> (special tokens, template, pad, eos, bos)
TOKENS = {
    "qwen2_vl": (_QWEN, QWEN_TEMPLATE, "<|endoftext|>", "<|im_end|>", None),
    "qwen2_5_vl": (_QWEN, QWEN_TEMPLATE, "<|endoftext|>", "<|im_end|>", None),
    "qwen3_vl": (_QWEN, QWEN_TEMPLATE, "<|endoftext|>", "<|im_end|>", None),
    "qwen3_5": (_QWEN, QWEN_TEMPLATE, "<|endoftext|>", "<|im_end|>", None),
    "mllama": (_LLAMA3, MLLAMA_TEMPLATE, "<|finetune_right_pad_id|>", "<|eot_id|>", "<|begin_of_text|>"),
    "llava": (("<pad>", "<s>", "</s>", "<image>"), LLAVA_TEMPLATE, "<pad>", "</s>", "<s>"),
    "gemma3": (_GEMMA, GEMMA_TEMPLATE, "<pad>", "<eos>", "<bos>"),
}
FAMILIES = tuple(TOKENS)
QWEN3 = ("qwen3_vl", "qwen3_5")  # with patches of 16 pixels
QWEN = tuple(name for name in FAMILIES if name.startswith("qwen"))
TEXTS = ["What is this? Who are they? Is the value of 38 in 2015?", "Yes. It is a red square. user assistant system"]


def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    special, template, pad, eos, bos = TOKENS[family]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        eos_token=eos,
        bos_token=bos,
        extra_special_tokens=named if family == "gemma3" else list(special),
    )
    if family == "mllama":  # as published, the image token is the first id beyond the rows of lm_head
        tokenizer.add_tokens(["<|image|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def config_of(family: str, tokenizer: PreTrainedTokenizerFast, *, vision: dict | None = None, text: dict | None = None):
    """Return a small configuration of the family; `vision` and `text` change it."""
    number = tokenizer.convert_tokens_to_ids
    shared = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.pad_token_id,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sections = {**rope, "mrope_section": [2, 3, 3]}
    if family in QWEN:
        ids = {
            f"{name}_token_id": number(f"<|{name.removesuffix('_token')}|>") for name in ("vision_start", "vision_end")
        }
        ids |= {"image_token_id": number("<|image_pad|>"), "video_token_id": number("<|video_pad|>")}
    tower = {
        "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
        "qwen2_5_vl": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                       "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        "qwen3_vl": {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                     "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        "qwen3_5": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                    "patch_size": 16, "num_position_embeddings": 64},
        "mllama": {"hidden_size": 16, "num_hidden_layers": 3, "num_global_layers": 1, "attention_heads": 2,
                   "intermediate_size": 32, "image_size": 28, "patch_size": 14, "max_num_tiles": 4,
                   "intermediate_layers_indices": [0, 1], "vision_output_dim": 48},
        "llava": {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64,
                  "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
                  "projection_dim": 32},
        "gemma3": {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
                   "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14},
    }[family] | (vision or {})  # fmt: skip
    words = shared | (text or {})
    if family == "qwen2_vl":
        return transformers.Qwen2VLConfig(text_config=words | {"rope_parameters": sections}, vision_config=tower, **ids)
    if family == "qwen2_5_vl":
        words |= {"rope_parameters": sections}
        return transformers.Qwen2_5_VLConfig(text_config=words, vision_config=tower, **ids)
    if family == "qwen3_vl":
        words |= {"rope_parameters": {**sections, "mrope_interleaved": True}, "head_dim": 16}
        return transformers.Qwen3VLConfig(text_config=words, vision_config=tower, **ids)
    if family == "qwen3_5":
        words |= {"rope_parameters": {**sections, "mrope_interleaved": True}, "head_dim": 16,
                  "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                  "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
        return transformers.Qwen3_5Config(text_config=words, vision_config=tower, **ids)
    if family == "mllama":
        image = number("<|image|>")
        words |= {"vocab_size": image, "num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": rope}
        return transformers.MllamaConfig(text_config=words, vision_config=tower, image_token_index=image)
    if family == "llava":
        words |= {"model_type": "llama"}
        return transformers.LlavaConfig(text_config=words, vision_config=tower, image_token_index=number("<image>"))
    words |= {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 64,
              "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    return transformers.Gemma3Config(
        text_config=words, vision_config=tower, mm_tokens_per_image=4, image_token_index=number("<image_soft_token>"),
        boi_token_index=number("<start_of_image>"), eoi_token_index=number("<end_of_image>"),
    )  # fmt: skip


def make_processor(family: str):
    """Return the Pillow-based image processor, with sizes that fit the small vision tower."""
    if family in QWEN:
        changes = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3} if family in QWEN3 else {}
        return transformers.Qwen2VLImageProcessorPil(
            size={"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64}, **changes
        )
    if family == "mllama":
        return transformers.MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4)
    square = {"height": 56, "width": 56}
    if family == "llava":
        return transformers.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=square)
    return transformers.Gemma3ImageProcessorPil(size=square)


def make(family: str, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, **changes) -> PreTrainedModel:
    return random_model(transformers.AutoModelForImageTextToText, config_of(family, tokenizer, **changes), seed=seed)


def save(family: str, folder: Path, **changes) -> Path:
    """Save model, tokenizer and image processor for `model.model_name_or_path`."""
    tokenizer = make_tokenizer(family)
    make(family, tokenizer, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_processor(family).save_pretrained(folder)
    return folder


def reader_of(folder: Path, **vision) -> ImageReader:
    """Return the image reader of a saved model."""
    config = transformers.AutoConfig.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return load_reader(ModelOptions(model_name_or_path=str(folder)), VisionSpec(**vision), config, tokenizer)
