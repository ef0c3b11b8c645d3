"""Our tokens, pixels, masks and positions are those that transformers' own processors and models make."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_vlms
import torch
import transformers
from asked_rows import asked
from batches_of import batch_of
from transformers.processing_utils import ProcessorMixin

from ligertune.models.save import write_model
from ligertune.vision.image_files import read_image

ROWS = {
    "one image": ("What is <image>this?", ("red",)),
    "first": ("<image>\nWhat is this?", ("blue",)),
    "two apart": ("<image> and <image>", ("green", "red")),
    "side by side": ("<image><image>Who?", ("blue", "red")),
    "none": ("What is this?", ()),
}


@pytest.fixture
def shown(prepared_for, pictures):
    """One example for each of ROWS."""

    def of(family):
        rows = [asked(text, "Yes", *(pictures[name] for name in names)) for text, names in ROWS.values()]
        return prepared_for(family, rows)

    return of


def processor_for(family, folder, reader):
    """The family's processor from a folder that we saved; Qwen's cannot be made without torchvision but like this."""
    if family not in tiny_vlms.QWEN:
        return transformers.AutoProcessor.from_pretrained(folder)
    theirs = getattr(transformers, reader.family.processor)

    class ImagesOnly(theirs):
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


@pytest.fixture
def saved(folder_of, reader_of, tokenizer_of, tmp_path):
    """The folder of a family as training leaves it."""

    def of(family):
        model = transformers.AutoModelForImageTextToText.from_pretrained(folder_of(family))
        write_model(
            model, tokenizer_of(family), tmp_path / "model", state_dict=None, prompt_template="chat",
            system_prompt=None, images=reader_of(family),
        )  # fmt: skip
        return tmp_path / "model"

    return of


def written(text, tokenizer):
    """A row as its template writes it, before the processor makes room for the pictures."""
    content = []
    for number, piece in enumerate(text.replace("<image>\n", "<image>").split("<image>")):
        content += [{"type": "image"}] if number else []
        content += [{"type": "text", "text": piece}] if piece else []
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}
    return tokenizer.apply_chat_template([{"role": "user", "content": content}, answer], tokenize=False)


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_tokens_and_pixels_are_the_processors_own(family, shown, saved, reader_of, pictures):
    rows, processor = shown(family), processor_for(family, saved(family), reader_of(family))
    for index, (text, names) in enumerate(ROWS.values()):
        images = [read_image(str(pictures[name])) for name in names]
        made = processor(
            images=images or None,
            text=[written(text, processor.tokenizer)],
            add_special_tokens=False,
            return_tensors="pt",
        )
        ours = batch_of(rows, None if not names else reader_of(family), (index,))
        assert made["input_ids"].tolist() == ours["input_ids"].tolist(), text
        assert bool(names) == ("pixel_values" in made)
        for name in set(made) & set(ours) - {"input_ids"}:
            assert torch.equal(made[name], ours[name]), name
        assert set(made) - set(ours) <= {"attention_mask", "mm_token_type_ids", "token_type_ids"}


@pytest.mark.parametrize("family", tiny_vlms.QWEN)
def test_positions_are_the_models_own(family, shown, reader_of, tokenizer_of):
    model, rows, reader = tiny_vlms.make(family, tokenizer_of(family)), shown(family), reader_of(family)
    indices = (0, 1, 2, 3)
    batch = batch_of(rows, reader, indices)
    lengths = torch.tensor([len(rows.train[index].input_ids) for index in indices])
    mask = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    theirs, _ = model.model.get_rope_index(
        batch["input_ids"],
        mm_token_type_ids=(batch["input_ids"] == reader.token_id).int(),
        image_grid_thw=batch["image_grid_thw"],
        attention_mask=mask,
    )
    keep = mask.bool().expand_as(theirs)
    assert torch.equal(batch["position_ids"][keep], theirs[keep])
    packed = batch_of(rows, reader, indices, packed=True, multiple_of=16)["position_ids"]
    alone = [theirs[:, row, :length] for row, length in enumerate(lengths.tolist())]
    assert torch.equal(packed[1:, 0, : int(lengths.sum())], torch.cat(alone, dim=1))
    text = np.concatenate([np.arange(length) for length in lengths.tolist()])
    assert packed[0, 0, : int(lengths.sum())].tolist() == text.tolist()


@pytest.mark.parametrize("family", tiny_vlms.FAMILIES)
def test_labels_are_the_answer_and_its_end_alone(family, shown, tokenizer_of, reader_of):
    ends = {"mllama": "Yes<|eot_id|>", "llava": " Yes </s>", "gemma3": "Yes<end_of_turn>"}
    for example in shown(family).train:
        trained = example.labels != -100
        assert tokenizer_of(family).decode(example.labels[trained]) == ends.get(family, "Yes<|im_end|>")
        assert not np.isin(example.labels[trained], list(reader_of(family).untrained)).any()


def test_images_of_unequal_number_are_no_batch_of_llama(shown, reader_of):
    with pytest.raises(ValueError, match="images in one batch"):
        batch_of(shown("mllama"), reader_of("mllama"), (0, 2))
