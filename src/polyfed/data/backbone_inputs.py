"""From raw images, texts and sounds to the input that a pretrained backbone was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import (
    NO_CODE,
    PREPROCESSOR,
    BackboneTower,
    configuration,
    full_length,
    has_tokenizer,
    quiet,
    read_backbone_config,
)
from polyfed.data.pictures import PIXELS, ImageFit, Resampling, decode, picture_bytes
from polyfed.data.spectrograms import recorded_mel

InputKind = Literal["picture", "sound", "text"]
_BANDS = "num_mel_bins"

# image processors write a filter as its number in Pillow
_PILLOW: dict[int, Resampling] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


class Prepared(NamedTuple):
    """Backbone input of b values: images [b, 3, s, s], spectrograms [b, t, m], or token ids [b, l] and their mask."""

    x: Tensor
    mask: Bool[Tensor, "b l"] | None


def input_kind(folder: Path, tower: BackboneTower) -> InputKind:
    """What the backbone in ``folder``, or one tower of it, takes: by its files, else its configuration.

    Raises:
        ConfigError: ``config.json`` describes nothing that ``transformers`` knows.
    """
    if tower != "whole":
        return "picture" if tower == "vision" else "text"
    if (folder / PREPROCESSOR).is_file():
        return "sound" if _BANDS in read_backbone_config(folder, PREPROCESSOR) else "picture"
    if has_tokenizer(folder):
        return "text"
    config = configuration(folder)
    if hasattr(config, _BANDS):
        return "sound"
    return "picture" if any(hasattr(config, name) for name in ("image_size", "num_channels")) else "text"


@dataclass(frozen=True)
class ImagePreparation:
    """Decode, resize, rescale and normalise as ``preprocessor_config.json`` says.

    Attributes:
        size: height and width in pixels.
        fit: ``squash`` resizes height and width on their own, ``crop`` keeps the aspect ratio and cuts the
        middle.
        resampling: filter of the resize.
        factor: brightness of one level of a byte.
        mean: of each channel.
        std: of each channel.
    """

    size: int
    fit: ImageFit
    resampling: Resampling
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, folder: Path, size: int | None, fit: ImageFit | None) -> ImagePreparation:
        """The preparation of the backbone in ``folder``, at its own size or at ``size``, with its own fit for None.

        Raises:
            ConfigError: ``preprocessor_config.json`` is missing or lacks what is needed.
        """
        if not (folder / PREPROCESSOR).is_file():
            what = f"'{folder}' holds no {PREPROCESSOR}, which says how its backbone takes images; put the file of the "
            raise ConfigError(f"{what}published model there, or what save_pretrained of its image processor writes")
        config = read_backbone_config(folder, PREPROCESSOR)
        mean, std = _mean_and_std(config, folder)
        number = config.get("resample", 2)
        if number not in _PILLOW:
            raise ConfigError(f"'{folder}/{PREPROCESSOR}': resample {number} is not one of {sorted(_PILLOW)}")
        return cls(
            size=size or _side(config, folder),
            fit=fit or ("crop" if config.get("do_center_crop") else "squash"),
            resampling=_PILLOW[number],
            factor=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
            mean=mean,
            std=std,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return 3, self.size, self.size

    def __call__(self, values: Sequence[Any], folder: Path | None = None, most: int = PIXELS) -> Prepared:
        """Image structs {bytes, path} or encoded bytes -> float32 images.

        Args:
            values: pictures.
            folder: of the data set; see ``picture_bytes``.
            most: pixels of a picture.

        Raises:
            Exception: of many kinds, as Pillow's decoders do, if a value is not a picture.
        """
        datas = [picture_bytes(value, folder, most) for value in values]
        pixels = np.stack([decode(data, self.size, self.fit, self.resampling, most) for data in datas])
        return Prepared(self.normalised(torch.from_numpy(pixels)), None)

    def normalised(self, pixels: Tensor) -> Float[Tensor, "b 3 s s"]:
        """Bytes [b, 3, s, s] -> what the backbone takes."""
        mean, std = torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.std).view(-1, 1, 1)
        return (pixels.float() * self.factor - mean) / std


def _mean_and_std(config: dict[str, Any], folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if not config.get("do_normalize", True):
        return (0.0,) * 3, (1.0,) * 3
    if not ("image_mean" in config and "image_std" in config):
        raise ConfigError(f"'{folder}/{PREPROCESSOR}' gives no image_mean and image_std; add them")
    return tuple(config["image_mean"]), tuple(config["image_std"])


def _side(config: dict[str, Any], folder: Path) -> int:
    size = config.get("size")
    if config.get("do_center_crop") and "crop_size" in config:
        size = config["crop_size"]
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge")
    if not isinstance(size, int):
        raise ConfigError(f"'{folder}/{PREPROCESSOR}' gives no size; set the view's size")
    return size


def require_tokenizer(folder: Path) -> None:
    """Raise ConfigError if the folder has none: for some models transformers would make one without words."""
    if not has_tokenizer(folder):
        raise ConfigError(
            f"'{folder}' holds no tokenizer, by which its backbone takes texts; put the files of the published model "
            "there, or what save_pretrained of its tokenizer writes"
        )


@dataclass(frozen=True)
class TextPreparation:
    """Tokenise as the backbone's own tokenizer does; longer texts are cut at ``length`` tokens.

    Attributes:
        tokenizer: tokenizer of ``transformers``.
        length: longest sequence.
        pad_to_length: pad every batch to ``length`` instead of to its longest text.
        full: pad to so many, of which the network reads all; None: padding is masked.
    """

    tokenizer: Any
    length: int
    pad_to_length: bool
    full: int | None = None

    @classmethod
    def of(cls, folder: Path, length: int, *, pad_to_length: bool) -> TextPreparation:
        """The preparation of the backbone in ``folder``.

        Raises:
            ConfigError: the folder holds no tokenizer, or one without a padding token.
        """
        from transformers import AutoTokenizer

        require_tokenizer(folder)
        try:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **NO_CODE)
        except (OSError, ValueError) as error:
            raise ConfigError(f"'{folder}' holds no usable tokenizer: {str(error).splitlines()[0]}") from error
        # batches are padded, and the mask says where
        if tokenizer.pad_token_id is None:
            raise ConfigError(f"the tokenizer in '{folder}' has no padding token; add one to its configuration")
        return cls(tokenizer, length, pad_to_length, full_length(folder))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.full or self.length,)

    def __call__(self, values: Sequence[Any], folder: Path | None = None, most: int = PIXELS) -> Prepared:
        """Texts -> token ids and mask; they name no files and have no pixels.

        Raises:
            TypeError: a value is not a string.
        """
        wrong = next((value for value in values if not isinstance(value, str)), None)
        if wrong is not None:
            raise TypeError(f"not a text but {type(wrong).__name__}")
        padding = "max_length" if self.pad_to_length else True
        batch = self.tokenizer(
            list(values), padding=padding, truncation=True, max_length=self.length, return_tensors="pt"
        )
        ids = cast("Int64[Tensor, 'b l']", batch["input_ids"])
        if self.full is not None:
            ids = functional.pad(ids, (0, self.full - ids.shape[1]), value=self.tokenizer.pad_token_id)
            return Prepared(ids, torch.ones_like(ids, dtype=torch.bool))
        return Prepared(ids, batch["attention_mask"].bool())


@dataclass(frozen=True)
class SoundPreparation:
    """Log-mel spectrograms as ``preprocessor_config.json`` of AST says (Gong et al. 2021).

    Attributes:
        rate: samples a second.
        bands: mel bands.
        frames: of a spectrogram, which is cut or filled up with zeros.
        mean: taken off.
        std: divided by.
    """

    rate: int
    bands: int
    frames: int
    mean: float
    std: float

    @classmethod
    def of(cls, folder: Path) -> SoundPreparation:
        """The preparation of the backbone in ``folder``.

        Raises:
            ConfigError: ``preprocessor_config.json`` is missing or lacks what is needed.
        """
        config = read_backbone_config(folder, PREPROCESSOR)
        try:
            rate, bands, frames = (int(config[key]) for key in ("sampling_rate", _BANDS, "max_length"))
            mean, std = float(config["mean"]), float(config["std"])
        except (KeyError, TypeError, ValueError) as error:
            what = f"'{folder}/{PREPROCESSOR}' does not say how its backbone takes sounds ({error}); it needs "
            raise ConfigError(f"{what}sampling_rate, {_BANDS}, max_length, mean and std") from error
        # transformers divides by twice the deviation
        return cls(rate, bands, frames, *((mean, 2 * std) if config.get("do_normalize", True) else (0.0, 1.0)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.frames, self.bands

    def __call__(self, values: Sequence[Any], folder: Path | None = None, most: int = PIXELS) -> Prepared:
        """Recordings, as ``sounds.waveform`` takes them -> float32 spectrograms.

        Raises:
            Exception: of many kinds, as scipy's, if a value is no recording.
        """
        each = [recorded_mel(value, self.rate, self.bands, self.frames, folder) for value in values]
        spectrograms = torch.stack(each)
        return Prepared((spectrograms - self.mean) / self.std, None)
