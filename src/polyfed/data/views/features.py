"""Cached features of frozen pretrained networks, and input prepared for pretrained networks."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data import backbones
from polyfed.data.cache import StoredRows, content_digest, remembered, unreadable
from polyfed.data.images import Augment, ImageFit, MeanStd
from polyfed.data.samples import Inputs
from polyfed.data.source import Column, Count
from polyfed.data.tokenizers import PretrainedTokenizer
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.mel import Mel
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens

_VERSION = 1  # raise when the same settings give other features
# maps of a few images stay in the CPU's cache: MobileNetV2 runs two to three times as fast as with 32
_BATCH = {"cpu": 4, "cuda": 128}
_DEFAULT = "facebook/deit-tiny-patch16-224"


class Features(View):
    """Features of an image, text or sound from a frozen ``transformers`` network: float32 [f], or [l, f] by position.

    A backbone of images or sounds (its folder has ``preprocessor_config.json``) needs a column of these, one of texts
    (with a tokenizer) strings. Features of the rows in use are computed once, on the GPU if available, and kept as
    float16 in the cache, under digests of the backbone and of the column; on a full disk they are computed for every
    batch, with a warning. The training view equals the evaluation view: frozen features are not augmented.
    """

    backbone: str = Field(default=_DEFAULT, min_length=1, description="folder below data.weights_dir, or hub name")
    pool: backbones.Pool = Field(
        default="auto",
        description="cls, mean (of all positions), pooled (its own pooler), projected (where towers meet) or tokens "
        "(all positions); auto: pooled for a tower of several, else cls for transformers, mean for convolutional "
        "networks",
    )
    positions: int | None = Field(
        default=None,
        ge=1,
        description="for pool tokens: number of positions that neighbours are averaged to, a square number for images, "
        "which keep their CLS token before them; null: all",
    )
    tower: backbones.Tower = Field(default="whole", description="vision or text, if it has both (CLIP)")
    size: int | None = Field(default=None, ge=8, description="image side in pixels; the backbone's own by default")
    fit: ImageFit = Field(default="squash", description="squash to a square, or crop to one")
    length: int = Field(default=64, ge=1, le=8192, description="tokens of a text; longer texts are cut")
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="arithmetic; bf16 is faster and coarser")
    batch_size: int | None = Field(default=None, ge=1, description="values per batch; null: 4 on a CPU, 128 on a GPU")

    @model_validator(mode="after")
    def _averages_tokens(self) -> Self:
        if self.positions is not None and self.pool != "tokens":
            raise ValueError(f"positions: {self.positions} has no effect with pool '{self.pool}'; set pool to tokens")
        return self

    @property
    def left(self) -> int | None:
        """Number of the backbone's last layers that are left out; None: its output."""
        return None

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """Features of a column, nested columns flattened in item order.

        Raises:
            ConfigError: the backbone is missing, or does not fit the settings.
            DataError: a value is not an image (or text); names its row and file.
        """
        folder = self._folder(context)
        compute = FeatureComputation(self, folder, column, context)
        return StoredRows(
            path=context.cache / f"{self._stem(folder, content_digest(column, context))}.npy",
            shape=lambda: (len(compute.values), *self.spec(modality, context).shape),
            compute=compute,
            what=f"{self.backbone} features of {column.where}",
            ahead=context.ahead,
            group=max(256, 16 * compute.block),
        )

    def cut(self, column: Column, modality: str, context: DataContext) -> Count | None:
        """See ``View``; only texts are cut."""
        folder = self._folder(context)
        if backbones.input_kind(folder, self.tower) != "text":
            return None
        tokens = Tokens(tokenizer=PretrainedTokenizer(path=str(folder)), length=max(2, self.length))
        return tokens.cut(column, modality, context)

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        folder = self._folder(context)
        path = context.cache / f"{self._stem(folder, 'shape')}.json"

        def shape() -> list[int]:
            one = self.prepare(folder).shape
            is_text = backbones.input_kind(folder, self.tower) == "text"
            blank = torch.zeros(1, *one, dtype=torch.int64 if is_text else torch.float32, device="meta")
            mask = torch.ones(1, *one, dtype=torch.bool, device="meta") if is_text else None
            outlined = backbones.outline(folder, self.pool, self.tower, self.left)(blank)
            return list(self.averaged(outlined, mask).shape[1:])

        return context.memo(str(path), lambda: InputSpec(tuple(remembered(path, shape))))

    def prepare(self, folder: Path) -> backbones.Preparation:
        """Conversion of a column's values to input of the backbone in ``folder``.

        Raises:
            ConfigError: the folder lacks the preprocessor or the tokenizer.
        """
        positions, what = self.positions, f"view features: positions is {self.positions}"
        match backbones.input_kind(folder, self.tower):
            case "image":
                if positions is not None and math.isqrt(positions) ** 2 != positions:
                    raise ConfigError(f"{what}, for images it must be a square such as 4 or 9")
                return backbones.ImagePreparation.of(folder, self.size, self.fit)
            case "sound":
                if positions is not None:
                    raise ConfigError(f"{what}, but those of sounds are not averaged")
                return backbones.SoundPreparation.of(folder)
        most = backbones.most_tokens(folder)
        if most is not None and self.length > most:
            has = f"length is {self.length}, but the text backbone '{self.backbone}' has positions for {most} tokens"
            raise ConfigError(f"view features: {has}; set the view's length to {most} or less")
        return backbones.TextPreparation.of(folder, self.length, pad_to_length=self.pool == "tokens" and not positions)

    def _folder(self, context: DataContext) -> Path:
        return backbones.locate(self.backbone, context.weights, key="view features, backbone", hub=context.hub)

    def averaged(self, features: Tensor, mask: Tensor | None) -> Tensor:
        return features if self.positions is None else backbones.averaged_neighbours(features, mask, self.positions)

    def _stem(self, folder: Path, content: str) -> str:
        """Name of a file in the cache, by the backbone, the settings that matter to it, and ``content``."""
        # without batch_size, which changes only the speed
        settings: list[Any] = {"image": [self.size, self.fit], "sound": []}.get(
            takes := backbones.input_kind(folder, self.tower), []
        )
        if takes == "text":
            settings = [self.length, *filter(None, [backbones.full_length(folder)])]
        settings += [] if self.positions is None else [self.positions]
        settings += [] if self.left is None else ["before last", self.left]
        pool = backbones.pool_of(self.pool, self.tower)
        identity = [_VERSION, content, backbones.digest(folder), pool, self.tower, self.precision, *settings]
        stamp = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        return f"features-{re.sub(r'[^A-Za-z0-9.-]+', '-', folder.name)}-{self.pool}-{stamp}"


class FeatureComputation:
    """Features of any rows of a column, which is read at first use, like the backbone."""

    def __init__(self, view: Features, folder: Path, column: Column, context: DataContext) -> None:
        self.view, self.folder, self.column, self.context = view, folder, column, context
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @functools.cached_property
    def values(self) -> pa.ChunkedArray:
        return self.column.flat_values()

    @functools.cached_property
    def prepare(self) -> backbones.Preparation:
        return self.view.prepare(self.folder)

    @property
    def block(self) -> int:
        """Rows per batch of the backbone."""
        return self.view.batch_size or _BATCH[self.device.type]

    @functools.cached_property
    def backbone(self) -> nn.Module:
        view = self.view

        def load() -> nn.Module:
            loaded = backbones.frozen_backbone(self.folder, view.pool, view.tower, view.left)
            return backbones.channels_last(loaded).to(self.device)

        # one for all columns
        return self.context.memo(f"backbone {backbones.digest(self.folder)} {view.pool} {view.tower} {view.left}", load)

    def __call__(self, rows: Sequence[int]) -> Tensor:
        """Features of ``rows``, whose bits do not depend on the other rows.

        As kernels differ between shapes, each batch has the shape that its rows would have if all rows were encoded in
        order; it is filled up with one of its rows.
        """
        together = defaultdict[tuple[int, int | None], list[int]](list)  # rows of a batch and tokens of a row -> rows
        blocks = defaultdict[int, list[int]](list)
        for row in rows:
            blocks[row - row % self.block].append(row)
        for start, members in blocks.items():
            of_block = self.values.slice(start, self.block)
            together[len(of_block), self.prepare.width(of_block)] += members
        taken = self.values.take(pa.array(rows))  # at once: it scans the complete column
        value_of, features = dict(zip(rows, taken, strict=True)), dict[int, Tensor]()
        for (size, width), members in together.items():
            for first in range(0, len(members), size):
                batch = members[first : first + size]
                values = [value_of[row].as_py() for row in batch]
                features |= zip(batch, self._batch(batch, values, size, width), strict=True)
        return torch.stack([features[row] for row in rows])

    def _batch(self, rows: Sequence[int], values: list[Any], size: int, width: int | None) -> Tensor:
        filling = [*range(len(rows)), *[0] * (size - len(rows))]
        parts = self._prepared(values, rows, width)
        x, mask = (None if part is None else part[filling].to(self.device) for part in parts)
        # weights stay in float32; only the arithmetic is coarser
        bf16 = torch.autocast(self.device.type, torch.bfloat16, enabled=self.view.precision == "bf16")
        with torch.inference_mode(), bf16:
            features = self.view.averaged(self.backbone(x, mask), mask)
        return features[: len(rows)].float().cpu()

    def _prepared(self, values: list[Any], rows: Sequence[int], width: int | None) -> backbones.Prepared:
        folder, pixels = self.column.folder, self.context.pixels
        try:
            return self.prepare(values, folder, pixels, width)
        except Exception:
            for row, value in zip(rows, values, strict=True):  # one at a time, to name the value that fails
                try:
                    self.prepare([value], folder, pixels)
                except Exception as error:  # Pillow's decoders raise errors of many types
                    what = f"backbone '{self.view.backbone}' cannot read it"
                    raise unreadable(self.column, row, value, error, what) from error
            raise


class States(Features):
    """States [l, f] of all positions before the last layers of a ``transformers`` network, which are trained."""

    short_name: ClassVar[str] = "states"

    pool: Literal["tokens"] = Field(default="tokens", description="states have all positions")
    positions: None = Field(default=None, description="states are not averaged")
    before_last: int = Field(ge=1, description="number of last layers that are left out")

    @property
    def left(self) -> int:
        return self.before_last


class Native(View):
    """Pixels, tokens or spectrograms with the settings of a pretrained network's folder, such as its tokenizer."""

    short_name: ClassVar[str] = "native"

    backbone: str = Field(min_length=1, description="folder below data.weights_dir, or hub name owner/name")
    tower: backbones.Tower = Field(default="whole", description="vision or text, of networks with both (CLIP)")
    size: int | None = Field(default=None, ge=8, le=2048, description="image side in pixels; None: the network's own")
    fit: ImageFit | None = Field(default=None, description="squash or crop; by default that of the network's processor")
    augment: Augment = Field(default=Augment(), description="random changes of images in the training view")
    length: int = Field(default=64, ge=2, le=8192, description="tokens of a text; longer texts are cut")

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        return self.resolved(modality, context).open(column, modality, context)

    def cut(self, column: Column, modality: str, context: DataContext) -> Count | None:
        """See ``View``."""
        return self.resolved(modality, context).cut(column, modality, context)

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        return self.resolved(modality, context).spec(modality, context)

    def resolved(self, modality: str, context: DataContext) -> Pixels | Tokens | Mel:
        """The view with the settings of the network's folder.

        Raises:
            ConfigError: the folder is missing, or lacks its preprocessor or tokenizer.
        """
        folder = backbones.locate(self.backbone, context.weights, key="view native, backbone", hub=context.hub)
        match backbones.input_kind(folder, self.tower):
            case "image":
                own = backbones.ImagePreparation.of(folder, self.size, self.fit)
                # pixels from 0 to 1 are 255 factors
                span = 255 * own.factor
                red, green, blue = (value / span for value in own.mean)
                constants = MeanStd(mean=(red, green, blue), std=tuple(value / span for value in own.std))
                return Pixels(
                    size=own.size, fit=own.fit, resampling=own.resampling, normalise=constants, augment=self.augment
                )
            case "sound":
                sound = backbones.SoundPreparation.of(folder)
                constant = {"mean": sound.mean, "std": sound.std}
                return Mel(rate=sound.rate, bands=sound.bands, frames=sound.frames, layout="positions", **constant)
        backbones.require_tokenizer(folder)
        most = backbones.most_tokens(folder)
        length = self.length if most is None else min(self.length, most)
        return Tokens(tokenizer=PretrainedTokenizer(path=str(folder)), length=length)
