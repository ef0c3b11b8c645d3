"""Image files: locate, check, and read them as RGB with the EXIF orientation applied.

Examples store paths, and images are read when a batch needs them. Images that a dataset holds as bytes are written once
to the cache folder, named by the hash of their content.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from ligertune.data.bad_rows import BadRow
from ligertune.errors import UserError, pip_install

if TYPE_CHECKING:
    from PIL import Image

_DATA_URL = re.compile(r"data:[\w/+.;=-]*;base64,", re.ASCII)
_DRAFT_SIDE = 64  # pixels; a check reads every byte of a JPEG but decodes it at this size
# What Pillow raises for files that are truncated, broken or not images.
_READ_ERRORS = (OSError, ValueError, SyntaxError, EOFError, OverflowError)


@dataclass(frozen=True)
class ImageFile:
    """A checked image file; width and height are in pixels, with the EXIF orientation applied."""

    path: str
    width: int
    height: int


def locate_image(reference: Any, folder: Path, store: Path) -> Path:
    """Return the file of an image reference: a path, a file: or data: URL, or {path, bytes}. Raises BadRow.

    Relative paths start from `folder`. Bytes are written to `store`.
    """
    # data sets of the hub hold {bytes, path}, whose path is a name and no file of this machine
    if isinstance(reference, dict):
        content = reference.get("bytes")
        if content:
            return _write_once(bytes(content), store)
        reference = next((reference[key] for key in ("path", "image", "url") if reference.get(key)), None)
    if not isinstance(reference, str) or not reference:
        raise BadRow("image cannot be read", f"{reference!r:.40} is neither a path nor an image")
    if found := _DATA_URL.match(reference):
        try:
            return _write_once(base64.b64decode(reference[found.end() :], validate=True), store)
        except (binascii.Error, ValueError) as error:
            raise BadRow("image cannot be read", f"a data URL: {error}") from error
    if reference.startswith(("http://", "https://")):
        raise BadRow("image on the network", reference[:80])
    if reference.startswith("file://"):
        reference = unquote(urlparse(reference).path)
    # expanduser makes ~ absolute, and `folder` does not change an absolute path
    path = folder / Path(reference).expanduser()
    if not path.is_file():
        raise BadRow("image is missing", str(path))
    return Path(os.path.abspath(path))


def _write_once(content: bytes, store: Path) -> Path:
    path = store / hashlib.sha256(content).hexdigest()
    if not path.exists():
        store.mkdir(parents=True, exist_ok=True)
        # Several processes may write the same image: a renamed file is complete for whoever reads it.
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_bytes(content)
        os.replace(aside, path)
    return path


def check_image(path: Path) -> ImageFile:
    """Read the whole file, so that damage shows now and not in training; return its size. Raises BadRow."""
    pil = import_pillow()
    try:
        with warnings.catch_warnings(), pil.open(path) as image:
            warnings.simplefilter("ignore")
            turned = image.getexif().get(0x0112, 1) >= 5  # EXIF orientations 5 to 8 swap width and height
            width, height = image.size
            image.draft("RGB", (_DRAFT_SIDE, _DRAFT_SIDE))
            image.load()
    except (*_READ_ERRORS, pil.DecompressionBombError) as error:
        raise BadRow("image cannot be read", f"{path}: {str(error) or type(error).__name__}") from error
    return ImageFile(str(path), *((height, width) if turned else (width, height)))


def read_image(path: str) -> Image.Image:
    """Return the image as upright RGB, transparency on white. Raises UserError if the file has changed since."""
    pil = import_pillow()
    from PIL import ImageOps

    try:
        with warnings.catch_warnings(), pil.open(path) as image:
            warnings.simplefilter("ignore")
            upright = ImageOps.exif_transpose(image)
            upright.load()
    except (*_READ_ERRORS, pil.DecompressionBombError) as error:
        raise UserError(
            f"{path}: the image could be read when the data was prepared, and cannot be read now: {error}.",
            hint="Put it back, and resume; or prepare the data again with data.cache: false.",
            exit_code=1,
        ) from error
    # convert("RGB") alone drops the transparency and shows what lies under it, often black.
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        upright = upright.convert("RGBA")
        white = pil.new("RGBA", upright.size, "white")
        upright = pil.alpha_composite(white, upright)
    return upright.convert("RGB")


def import_pillow() -> Any:
    """Return the module PIL.Image. Raises UserError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(
            "Images are read by Pillow, which is not installed.", hint=f"Install it: {pip_install('pillow')}"
        ) from error
    return Image
