"""A prompt with pictures, as training showed such rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ligertune.data.cache import cache_home
from ligertune.data.rows.conversation import BadRow, Conversation, Message
from ligertune.data.rows.image_rows import IMAGE_MARK, ImageTokens, extract_images, image_parts
from ligertune.data.templates.control_tokens import Rendered
from ligertune.errors import UserError
from ligertune.vision.image_files import ImageFile
from ligertune.vision.inputs import image_inputs
from ligertune.vision.reader import ImageReader


def with_images(
    reader: ImageReader, tokenizer: PreTrainedTokenizerBase, prompt: str, images: Sequence[str], how: dict
) -> tuple[str, bool, list[ImageFile]]:
    """(the prompt in its template with one token for each picture, whether it holds its BOS, the pictures)."""
    places = ImageTokens(reader, str(Path.cwd()), cache_home().with_name("images"))
    try:
        row, references = extract_images({"messages": [{"role": "user", "content": prompt}], "images": list(images)})
        asked = row["messages"][0]["content"]
        pictures = places.pictures(Conversation((Message("user", asked),)), references, "")
        if how["prompt_template"] != "chat" or not tokenizer.chat_template:
            return places.placed(Rendered(asked, ()), pictures).text, False, pictures
        system = [{"role": "system", "content": how["system_prompt"]}] if how["system_prompt"] else []
        content = (
            image_parts(asked) if "image" in tokenizer.chat_template else IMAGE_MARK.sub(reader.template_text, asked)
        )
        messages = [*system, {"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return places.placed(Rendered(text, ()), pictures).text, True, pictures
    except BadRow as bad:
        raise UserError(f"--image: {bad}.", hint="Name a file for each <image> in the prompt, or write none.") from bad


def prompt_inputs(reader: ImageReader, input_ids: Tensor, pictures: Sequence[ImageFile]) -> dict[str, Tensor]:
    """What `generate` takes: the tokens (1, T) with as many for each picture as it takes, and its pixels."""
    is_image = input_ids[0] == reader.token_id
    times = torch.ones(input_ids.shape[1], dtype=torch.long)
    times[is_image] = torch.tensor([reader.tokens(picture) for picture in pictures])
    input_ids = input_ids[0].repeat_interleave(times)[None]
    inputs = image_inputs(reader, input_ids, [[reader.pixels(picture.path) for picture in pictures]])
    if reader.family.positions == "sections":  # `generate` makes its own, from these
        del inputs["position_ids"]
        inputs["mm_token_type_ids"] = (input_ids == reader.token_id).long()
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **inputs}
