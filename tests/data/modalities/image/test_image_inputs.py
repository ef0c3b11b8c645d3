"""Image inputs equal those of transformers' processors and models; prefetching of pixels."""

import numpy as np
import pytest
import torch
import transformers
from support.data.image_batches import batch_of, image_row
from support.models import tiny_vlms
from transformers.processing_utils import ProcessorMixin

from ligertune.data.batching.collate import FilePrefetcher
from ligertune.data.modalities.image.image_files import read_image
from ligertune.errors import UserError
from ligertune.models.save import write_model

ROWS = {
    "one image": ("What is <image>this?", ("red",)),
    "first": ("<image>\nWhat is this?", ("blue",)),
    "two apart": ("<image> and <image>", ("green", "red")),
    "adjacent": ("<image><image>Who?", ("blue", "red")),
    "none": ("What is this?", ()),
}


@pytest.fixture
def examples_of(prepared_for, image_paths):
    """Of a family: one example for each of ROWS."""
    rows = [image_row(text, "Yes", *(image_paths[name] for name in names)) for text, names in ROWS.values()]
    return lambda family: prepared_for(family, rows)


def processor_for(family, folder, reader):
    """Load the processor from a folder that we saved. Qwen's needs torchvision unless it is built like this."""
    if family not in tiny_vlms.QWEN:
        return transformers.AutoProcessor.from_pretrained(folder)

    class ImagesOnly(getattr(transformers, reader.family.processor)):
        def __init__(self, image_processor, tokenizer, chat_template=None):
            for name in ("image", "video"):
                setattr(self, f"{name}_token", f"<|{name}_pad|>")
                setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))
            for name in ("vision_start", "vision_end"):
                setattr(self, f"{name}_token", f"<|{name}|>")
                setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{name}|>"))
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    images = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    return ImagesOnly(images, transformers.AutoTokenizer.from_pretrained(folder))


def render(text, tokenizer):
    """Return a row as the chat template writes it, before the processor expands its images."""
    content = []
    for number, piece in enumerate(text.replace("<image>\n", "<image>").split("<image>")):
        content += [{"type": "image"}] if number else []
        content += [{"type": "text", "text": piece}] if piece else []
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}
    return tokenizer.apply_chat_template([{"role": "user", "content": content}, answer], tokenize=False)


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_tokens_and_pixels_equal_the_processors(
    family, examples_of, folder_of, tokenizer_of, reader_of, image_paths, tmp_path
):
    """The processor is loaded from the folder that training writes."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder_of(family))
    settings = {"prompt": {"prompt_template": "chat", "system_prompt": None}, "reader": reader_of(family)}
    write_model(model, tokenizer_of(family), tmp_path / "model", state_dict=None, **settings)
    rows, processor = examples_of(family), processor_for(family, tmp_path / "model", reader_of(family))
    for index, (text, names) in enumerate(ROWS.values()):
        images = [read_image(str(image_paths[name])) for name in names]
        options = {"add_special_tokens": False, "return_tensors": "pt"}
        made = processor(images=images or None, text=[render(text, processor.tokenizer)], **options)
        found = batch_of(rows, None if not names else reader_of(family), (index,))
        assert made["input_ids"].tolist() == found["input_ids"].tolist(), text
        assert bool(names) == ("pixel_values" in made)
        for name in set(made) & set(found) - {"input_ids"}:
            assert torch.equal(made[name], found[name]), name
        assert set(made) - set(found) <= {"attention_mask", "mm_token_type_ids", "token_type_ids"}


@pytest.mark.parametrize("family", tiny_vlms.QWEN)
def test_positions_equal_the_models(family, examples_of, reader_of, tokenizer_of):
    model, rows, reader = tiny_vlms.make(family, tokenizer_of(family)), examples_of(family), reader_of(family)
    indices = (0, 1, 2, 3)
    batch = batch_of(rows, reader, indices)
    lengths = torch.tensor([len(rows.train[index].input_ids) for index in indices])
    mask = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    given = {name: batch[name] for name in ("input_ids", "image_grid_thw")}
    types = (batch["input_ids"] == reader.token_id).int()
    expected, _ = model.model.get_rope_index(**given, mm_token_type_ids=types, attention_mask=mask)
    keep = mask.bool().expand_as(expected)
    assert torch.equal(batch["position_ids"][keep], expected[keep])
    packed = batch_of(rows, reader, indices, packed=True, multiple_of=16)["position_ids"]
    alone = [expected[:, row, :length] for row, length in enumerate(lengths.tolist())]
    assert torch.equal(packed[1:, 0, : int(lengths.sum())], torch.cat(alone, dim=1))
    text = np.concatenate([np.arange(length) for length in lengths.tolist()])
    assert packed[0, 0, : int(lengths.sum())].tolist() == text.tolist()


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_labels_are_the_answer_and_its_end(family, examples_of, tokenizer_of, reader_of):
    ends = {"mllama": "Yes<|eot_id|>", "llava": " Yes </s>", "gemma3": "Yes<end_of_turn>"}
    rows = examples_of(family)
    for example in rows.train:
        trained = example.labels != -100
        assert tokenizer_of(family).decode(example.labels[trained]) == ends.get(family, "Yes<|im_end|>")
        assert not np.isin(example.labels[trained], list(reader_of(family).untrained)).any()
    labels = batch_of(rows, reader_of(family), (4,))["labels"]  # a row without images gets a blank one
    assert int((labels != -100).sum()) == int(trained.sum())


def test_mllama_refuses_a_batch_of_rows_with_different_numbers_of_images(examples_of, reader_of):
    with pytest.raises(ValueError, match="images in one batch"):
        batch_of(examples_of("mllama"), reader_of("mllama"), (0, 2))


def test_prefetched_pixels_are_released_after_the_last_use(reader_of, image_paths, tmp_path):
    reader = reader_of("qwen2_vl")
    prefetcher = FilePrefetcher(reader)
    red, blue = str(image_paths["red"]), str(image_paths["blue"])
    prefetcher.expect([red, blue, red])
    first, second = prefetcher.take(red), prefetcher.take(red)
    assert first is second and red not in prefetcher._made and blue in prefetcher._made
    for path in (blue, red):  # expected, and not expected
        assert torch.equal(prefetcher.take(path)["pixel_values"], reader.read(path)["pixel_values"])
    assert not prefetcher._made
    # an image that was deleted after preparation
    prefetcher.expect([str(tmp_path / "gone.png")])
    with pytest.raises(UserError, match=r"gone\.png: the image could be read when the data was prepared"):
        prefetcher.take(str(tmp_path / "gone.png"))
