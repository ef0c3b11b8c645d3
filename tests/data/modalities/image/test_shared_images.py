"""Records of public image datasets: all are loaded, with their images in the right place."""

import json
import re

import pytest
import transformers

from ligertune.data.modalities.image.image_files import check_image
from ligertune.data.modalities.image.reader import load_reader
from ligertune.data.modalities.image.recipe import VisionSpec
from ligertune.planning.options import ModelOptions

pytestmark = pytest.mark.corpus

# file -> (records, images)
FILES = {
    "cc12m_32/llava_pretrain_style.json": (32, 32),
    "mllm_demo/mllm_demo.json": (6, 8),
    "qwen_vl_demo/single_images.json": (3, 3),
    "xcomposer_demo/single_turn_single_image_example.json": (2, 2),
    "xcomposer_demo/multi_turn_multi_images_example.json": (2, None),
    "xcomposer_demo/only_text_example.json": (2, 0),
}


@pytest.mark.parametrize("file", FILES)
def test_every_record_is_used(file, corpus, prepared_for):
    records, images = FILES[file]
    prepared = prepared_for("qwen2_vl", corpus / "images" / file, max_length=100_000)
    assert prepared.report.dropped == {} and len(prepared.train) == records
    written = json.loads((corpus / "images" / file).read_text(encoding="utf-8"))
    named = [row.get("image", row.get("images")) or [] for row in written]
    counts = [1 if isinstance(given, str) else len(given) for given in named]
    assert prepared.train.n_media.tolist() == counts
    assert images is None or sum(counts) == images


def test_other_marks_missing_marks_and_captions_that_name_no_image(corpus, prepared_for, tokenizer_of):
    """captions.jsonl has a key and a text. xcomposer: two records use `<ImageHere>`, two have no mark (image first)."""
    prepared = prepared_for("qwen2_vl", corpus / "images" / "cc12m_32" / "captions.jsonl")
    assert prepared.report.sets[0].format == "text" and not prepared.train.n_media.any()
    folder, tokenizer = corpus / "images" / "xcomposer_demo", tokenizer_of("qwen2_vl")
    single = prepared_for("qwen2_vl", folder / "single_turn_single_image_example.json").train[0]
    assert tokenizer.decode(single.input_ids[:4]).startswith("<|im_start|>user\n<|vision_start|>")
    several = prepared_for("qwen2_vl", folder / "multi_turn_multi_images_example.json", max_length=100_000).train[0]
    text = tokenizer.decode(several.input_ids)
    assert "ImageHere" not in text and "Image1: <|vision_start|>" in text and "; Image2: <|vision_start|>" in text


@pytest.mark.parametrize(
    ("file", "question", "answers"),
    [
        ("qwen_vl_demo/single_images.json", "Is the value of Favorable 38 in 2015?{image}", "Yes<|im_end|>"),
        ("mllm_demo/mllm_demo.json", "{image}Who are they?", "They're Kane and Gretzka from Bayern Munich.<|im_end|>"
         "They are celebrating on the soccer field.<|im_end|>"),
    ],
)  # fmt: skip
def test_marks_after_the_question_and_a_file_named_twice(file, question, answers, corpus, prepared_for, tokenizer_of):
    prepared, tokenizer = prepared_for("qwen2_vl", corpus / "images" / file), tokenizer_of("qwen2_vl")
    example = prepared.train[0]
    assert tokenizer.decode(example.labels[example.labels != -100]) == answers
    text = re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", tokenizer.decode(example.input_ids))
    shown = question.format(image="<|vision_start|><|image_pad|><|vision_end|>")
    assert f"<|im_start|>user\n{shown}<|im_end|>" in text


def test_tokens_of_the_published_configuration(corpus, tmp_path):
    """cc12m_32 with Qwen2-VL's processor: 225 to 540 tokens per image, 389 on average. Saved limits load again."""
    spec = ModelOptions(model_name_or_path=str(corpus / "model_configs" / "Qwen2-VL-2B-Instruct"))
    config = transformers.AutoConfig.from_pretrained(spec.model_name_or_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpus / "tokenizers" / "qwen2.5")
    reader = load_reader(spec, VisionSpec(image_max_pixels=12_845_056), config, tokenizer)
    images = sorted((corpus / "images" / "cc12m_32" / "images").iterdir())
    tokens = [reader.tokens(check_image(path)) for path in images]
    assert (min(tokens), max(tokens), round(sum(tokens) / len(tokens))) == (225, 540, 389)
    small = load_reader(spec, VisionSpec(image_max_pixels=50_176, image_min_pixels=4_000), config, tokenizer)
    small.save(tmp_path)
    again = load_reader(ModelOptions(model_name_or_path=str(tmp_path)), None, config, tokenizer)
    assert again.options == small.options == {"size": {"shortest_edge": 4_000, "longest_edge": 50_176}}
