"""A picture's file: found, checked, and read as RGB the way up that its EXIF says.

Pictures are named by paths and read when a batch needs them. Those that a data set holds as bytes are written once into
the cache's folder, under the hash of their content.
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

from ligertune.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

_DATA_URL = re.compile(r"data:[\w/+.;=-]*;base64,", re.ASCII)
_SCALED = 64  # to check a JPEG every byte is read, but no more pixels than these a side are made


class ImageError(Exception):
    """A picture that cannot be used: `reason` is one of conversation.REASONS, `detail` says which and why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class ImageFile:
    """A file that was read to its end; the size is that of the picture the right way up, in pixels."""

    path: str
    width: int
    height: int


def locate_image(reference: Any, folders: tuple[Path, ...], store: Path) -> Path:
    """The file of what a data set calls an image: a path, a file: or data: URL, or {path, bytes}; else a PictureError.

    Relative paths are looked for in `folders`, in order. `store`: where bytes become files.
    """
    if isinstance(reference, dict):
        content = reference.get("bytes")
        if content:
            return _stored(bytes(content), store)
        reference = next((reference[key] for key in ("path", "image", "url") if reference.get(key)), None)
    if not isinstance(reference, str) or not reference:
        raise ImageError("image cannot be read", f"{reference!r:.40} is neither a path nor a picture")
    if found := _DATA_URL.match(reference):
        try:
            return _stored(base64.b64decode(reference[found.end() :], validate=True), store)
        except (binascii.Error, ValueError) as error:
            raise ImageError("image cannot be read", f"a data URL: {error}") from error
    if reference.startswith(("http://", "https://")):
        raise ImageError("image on the network", reference[:80])
    if reference.startswith("file://"):
        reference = unquote(urlparse(reference).path)
    path = Path(reference).expanduser()
    candidates = [path] if path.is_absolute() else [folder / path for folder in folders]
    for candidate in candidates:
        if candidate.is_file():
            return Path(os.path.abspath(candidate))
    raise ImageError("image is missing", str(candidates[0] if candidates else path))


def _stored(content: bytes, store: Path) -> Path:
    path = store / hashlib.sha256(content).hexdigest()
    if not path.exists():
        store.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_bytes(content)
        os.replace(aside, path)
    return path


def check_image(path: Path) -> ImageFile:
    """Reads the whole file, so that what is cut off or broken shows now and not in training; its size."""
    pil = _pil()
    try:
        with warnings.catch_warnings(), pil.open(path) as image:
            warnings.simplefilter("ignore")
            turned = image.getexif().get(0x0112, 1) >= 5  # EXIF orientation: 5 to 8 lie on their side
            width, height = image.size
            image.draft("RGB", (_SCALED, _SCALED))
            image.load()
    except (*_FLAWS, pil.DecompressionBombError) as error:
        raise ImageError("image cannot be read", f"{path}: {str(error) or type(error).__name__}") from error
    return ImageFile(str(path), *((height, width) if turned else (width, height)))


def read_image(path: str) -> Image.Image:
    """The picture as RGB, upright; transparent parts are white. A UserError if the file is no longer what it was."""
    pil = _pil()
    from PIL import ImageOps

    try:
        with warnings.catch_warnings(), pil.open(path) as image:
            warnings.simplefilter("ignore")
            upright = ImageOps.exif_transpose(image)
            upright.load()
    except (*_FLAWS, pil.DecompressionBombError) as error:
        raise UserError(
            f"{path}: the picture could be read when the data was prepared, and cannot be now: {error}.",
            hint="Put it back, and resume; or prepare the data again with data.cache: false.",
            exit_code=1,
        ) from error
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        upright = upright.convert("RGBA")
        white = pil.new("RGBA", upright.size, "white")
        upright = pil.alpha_composite(white, upright)
    return upright.convert("RGB")


# what Pillow raises for files that are cut off, broken or no pictures
_FLAWS = (OSError, ValueError, SyntaxError, EOFError, OverflowError)


def _pil() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(
            "Pictures are read by Pillow, which is not installed.", hint="Install ligertune[vision]."
        ) from error
    return Image
