"""Pictures in prompts, for vision-language models: reading them, their placeholders, and the model's inputs.

A picture travels as the bytes of its file (PNG, JPEG, ...), uint8 ``[bytes]``, and each process that needs its tensors
makes and caches them. In a text, `PLACE` marks where a picture stands. In token ids, a picture is a run of placeholder
tokens, one for each vector that the model's vision tower makes of it.

A response ends at a placeholder, should the policy ever sample one (see `picture_tokens`): as an input it
would ask for a picture that is not there.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PretrainedConfig

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""``model_type`` of the models whose placeholders, positions and picture tensors this module knows."""
PLACE = "<image>"
"""Text that marks the place of a picture in a row that has pictures."""
_CACHED = 64
"""Pictures whose tensors a process keeps."""
_STAND_IN_SIDE = 16


class NoPicture(ValueError):
    """Raised for a picture that cannot be used; the message is the reason."""


def is_seeing(config: PretrainedConfig) -> bool:
    """Return True for a vision-language model that can be given pictures."""
    return config.model_type in FAMILIES


def picture_tokens(config: PretrainedConfig) -> tuple[int, ...]:
    """Return the placeholder tokens of pictures, which end every response; none for a model that sees no pictures."""
    return (config.image_token_id, config.video_token_id) if is_seeing(config) else ()


def policy_class(config: PretrainedConfig) -> Any:
    """Return transformers' auto class of a policy with this configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_seeing(config) else AutoModelForCausalLM


def read_picture(source: Any, folder: Path) -> np.ndarray:
    """Return the bytes of a picture's file, uint8 ``[bytes]``.

    ``source`` is a path (relative to ``folder``), a ``data:`` address, bytes, a PIL image, or a mapping with one of the
    first three under ``bytes``, ``path`` or ``url``. Raises `NoPicture`.
    """
    if isinstance(source, Mapping):
        source = next((source[key] for key in ("bytes", "path", "url") if source.get(key)), None)
    if isinstance(source, str):
        source = _read_text_source(source, folder)
    elif hasattr(source, "save"):  # a PIL image, into which `datasets` decodes a column of pictures
        source = png(source)
    if not isinstance(source, bytes):
        raise NoPicture(f"a picture is a path, a `data:` address or bytes, not a {type(source).__name__}")
    picture = np.frombuffer(source, dtype=np.uint8)
    decoded(picture)
    return picture


def _read_text_source(source: str, folder: Path) -> bytes:
    if source.startswith("data:"):
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except binascii.Error as cause:
            raise NoPicture(f"a `data:` address is not base64 ({cause})") from cause
    if source.startswith(("http://", "https://")):
        raise NoPicture(f"`{source}` would have to be downloaded; save it as a file")
    try:
        return (folder / source.removeprefix("file://")).read_bytes()
    except (OSError, ValueError) as cause:
        raise NoPicture(f"cannot read the picture `{source}` ({getattr(cause, 'strerror', None) or cause})") from cause


def decoded(picture: np.ndarray) -> Image:
    """Return a picture in RGB. Raises `NoPicture` if its bytes are not those of a picture file."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(picture.tobytes())) as image:
            return image.convert("RGB")
    except Exception as cause:  # each format's reader raises errors of its own
        raise NoPicture(f"a picture cannot be decoded ({type(cause).__name__}: {cause})") from cause


def picture_format(picture: np.ndarray) -> str:
    """Return the format of a picture's file in lower case, such as ``png``."""
    return _header(picture)[0].lower()


def _header(picture: np.ndarray) -> tuple[str, tuple[int, int]]:
    """Return the format of a picture's file, and width and height in pixels, without decoding it."""
    from PIL import Image

    with Image.open(io.BytesIO(picture.tobytes())) as image:
        return str(image.format), image.size


def png(image: Image) -> bytes:
    """Return an image as the bytes of a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class PictureProcessor:
    """Converter of pictures into a model's own form: placeholders in its prompts, and tensors among its inputs.

    Nothing is read before the first picture. Pixels are prepared with Pillow in every process, so all of them agree.
    """

    def __init__(self, model_path: str, trust_remote_code: bool = False) -> None:
        self._model_path = model_path
        self._trusts = trust_remote_code
        self._cache: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    @cached_property
    def config(self) -> PretrainedConfig:
        """Configuration of the model. Raises `NoPicture` for a model that cannot be given pictures."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._model_path, trust_remote_code=self._trusts)
        if not is_seeing(config):
            raise NoPicture(
                f"{self._model_path} ({config.model_type}) cannot be given pictures; {', '.join(FAMILIES)} can"
            )
        return config

    @cached_property
    def _images(self) -> Any:
        """The model's image processor. Raises `NoPicture` if it has none."""
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self._model_path, backend="pil", trust_remote_code=self._trusts)
        except (OSError, ValueError) as cause:
            raise NoPicture(f"{self._model_path} has no usable `preprocessor_config.json` ({cause})") from cause

    def require(self) -> None:
        """Raise `NoPicture` if the model cannot be given pictures, or its image processor cannot be loaded."""
        self.config, self._images  # noqa: B018 - both are read when they are first asked for

    def placeholders(self, picture: np.ndarray) -> int:
        """Return the number of placeholder tokens of a picture."""
        width, height = _header(picture)[1]
        try:
            patches = self._images.get_number_of_image_patches(height, width, {})
        except ValueError as cause:
            raise NoPicture(f"the model cannot be given a picture of {width} x {height} pixels ({cause})") from cause
        return int(patches) // self._images.merge_size**2

    def expanded(self, token_ids: np.ndarray, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Return token ids (int32) with one placeholder per picture replaced by as many as the picture has.

        Raises `NoPicture` if there are not as many placeholders as pictures, or if the prompt ends with one.
        """
        places = np.flatnonzero(np.isin(token_ids, picture_tokens(self.config)))
        if len(places) != len(pictures):
            raise NoPicture(f"the rendered prompt has {len(places)} places for {len(pictures)} pictures")
        if len(places) and places[-1] == len(token_ids) - 1:
            raise NoPicture("the prompt ends with a picture; text has to follow it")
        repeats = np.ones(len(token_ids), dtype=np.int64)
        repeats[places] = [self.placeholders(picture) for picture in pictures]
        return np.repeat(token_ids, repeats).astype(np.int32)

    def collapsed(self, token_ids: np.ndarray, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Undo `expanded`, for engines that expand placeholders themselves. A response may follow the prompt."""
        kept = np.ones(len(token_ids), dtype=bool)
        place = 0
        for picture in pictures:
            place += int(np.argmax(token_ids[place:] == self.config.image_token_id))
            count = self.placeholders(picture)
            kept[place + 1 : place + count] = False
            place += count
        return token_ids[kept]

    def model_arguments(self, input_ids: Tensor, pictures: Sequence[Sequence[np.ndarray]]) -> dict[str, Tensor]:
        """Return the model's keyword arguments for ``input_ids`` (int64 ``[rows, width]``) and each row's pictures.

        Placeholders beyond those of a row's pictures (the end of its response) become token 0. Without any picture, a
        black one is put behind the first row: the vision tower then runs on every rank, and no result depends on it.
        """
        import torch

        if not any(pictures):
            stand_in = _stand_in()
            tail = input_ids.new_zeros(len(input_ids), self.placeholders(stand_in))
            tail[0] = self.config.image_token_id
            input_ids, pictures = torch.cat([self._cut(input_ids, pictures), tail], dim=1), [[stand_in]]
        else:
            input_ids = self._cut(input_ids, pictures)
        pixels, grids = zip(*[self._tensors(picture) for row in pictures for picture in row], strict=True)
        return {
            "input_ids": input_ids,
            "pixel_values": torch.cat(pixels).to(input_ids.device),
            "image_grid_thw": torch.cat(grids).to(input_ids.device),
            "mm_token_type_ids": (input_ids == self.config.image_token_id).int(),
        }

    def _cut(self, input_ids: Tensor, pictures: Sequence[Sequence[np.ndarray]]) -> Tensor:
        counts = input_ids.new_tensor([sum(map(self._count, row)) for row in pictures])
        is_place = input_ids == self.config.image_token_id
        return input_ids.masked_fill(is_place & (is_place.cumsum(dim=1) > counts[:, None]), 0)

    def _count(self, picture: np.ndarray) -> int:
        return int(self._tensors(picture)[1].prod()) // self._images.merge_size**2

    def _tensors(self, picture: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the pixels of a picture's patches, float32 ``[patches, values]``, and its grid, int64 ``[1, 3]``."""
        key = digest([picture])
        if key not in self._cache:
            found = self._images(images=[decoded(picture)], return_tensors="pt")
            self._cache[key] = found["pixel_values"], found["image_grid_thw"]
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]


def digest(pictures: Sequence[np.ndarray]) -> str:
    """Return a hash of pictures, equal for equal files in equal order; empty without pictures."""
    return "".join(xxhash.xxh3_128_hexdigest(picture.tobytes()) for picture in pictures)


def _stand_in() -> np.ndarray:
    from PIL import Image

    return np.frombuffer(png(Image.new("RGB", (_STAND_IN_SIDE, _STAND_IN_SIDE))), dtype=np.uint8)
