"""Features of a frozen pretrained backbone, computed once and read from a cache from then on."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Literal

import pyarrow as pa
import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from polyfed.data.arrow import flattened, place_of
from polyfed.data.backbone_inputs import ImagePreparation, Prepared, TextPreparation
from polyfed.data.backbones import Backbone, Pool, Tower, digest, frozen, locate, outline
from polyfed.data.cache import Fit
from polyfed.data.feature_store import Rows, stored
from polyfed.data.source import Column
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.errors import DataError

Preparation = ImagePreparation | TextPreparation

_VERSION = 1  # raise when the same settings give other features
# a convolution map of a few images stays in the CPU's cache: MobileNetV2 runs two to three times as fast as with 32
_BATCH = {"cpu": 4, "cuda": 128}
_DEFAULT = "facebook/deit-tiny-patch16-224"


class Features(View):
    """What a frozen ``transformers`` network says of an image or a text: float32 [f], or [l, f] by position.

    An image backbone (its folder has ``preprocessor_config.json``) needs a column of images, a text backbone
    (with a tokenizer) one of strings. The features of a whole column are computed once, on the GPU if there
    is one, and kept as float16 in the cache, under the content of the backbone and of the column. There is no
    training view: frozen features have no augmentation.
    """

    backbone: str = Field(
        default=_DEFAULT, min_length=1, description="folder below data.weights_dir, or hub name owner/name"
    )
    pool: Pool = Field(
        default="auto",
        description="cls, mean (of all positions), pooled (its own pooler) or tokens (all positions); auto: "
        "cls for transformers, mean for convolutional networks",
    )
    tower: Tower = Field(default="whole", description="vision or text, for backbones with both (CLIP)")
    size: int | None = Field(
        default=None, ge=8, description="image side in pixels; the backbone's own by default"
    )
    fit: Fit = Field(default="squash", description="squash to a square, or crop to one")
    length: int = Field(default=64, ge=1, le=8192, description="tokens of a text, the rest is cut off")
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="arithmetic of the backbone")
    batch_size: int | None = Field(
        default=None, ge=1, description="images or texts at a time; by default 4 on a CPU, 128 on a GPU"
    )

    def open(self, column: Column, modality: str, context: DataContext) -> FeatureInputs:
        """Features of a column, nested columns flattened in item order.

        Raises:
            ConfigError: the backbone cannot be had, or does not fit the settings.
            DataError: a value is not an image (or text); the message names its row and file.
        """
        folder = self._folder(context)
        preparation = self._preparation(folder)
        values = flattened(column)
        compute = _Computation(self, folder, preparation, column, values)
        path = context.cache / f"{self._stem(folder, column, preparation)}.npy"
        return FeatureInputs(stored(path, len(values), self._shape(folder, preparation), compute))

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Shape of the features, (f,) or (l, f), found without running the backbone."""
        folder = self._folder(context)
        key = f"feature shape {digest(folder)} {self.model_dump_json()}"
        if key not in context.fitted:
            context.fitted[key] = InputSpec(self._shape(folder, self._preparation(folder)))
        spec = context.fitted[key]
        assert isinstance(spec, InputSpec)
        return spec

    def _folder(self, context: DataContext) -> Path:
        return locate(self.backbone, context.weights, key="view features, backbone")

    def _preparation(self, folder: Path) -> Preparation:
        is_image = self.tower == "vision" or (
            self.tower == "whole" and (folder / "preprocessor_config.json").is_file()
        )
        if is_image:
            return ImagePreparation.of(folder, self.size, self.fit)
        return TextPreparation.of(folder, self.length, pad_to_length=self.pool == "tokens")

    def _shape(self, folder: Path, preparation: Preparation) -> tuple[int, ...]:
        dtype = torch.float32 if isinstance(preparation, ImagePreparation) else torch.int64
        blank = torch.zeros(1, *preparation.shape, dtype=dtype, device="meta")
        return tuple(outline(folder, self.pool, self.tower)(blank).shape[1:])

    def _stem(self, folder: Path, column: Column, preparation: Preparation) -> str:
        settings = [self.pool, self.tower, self.fit, self.precision]
        identity = [_VERSION, column.fingerprint, digest(folder), settings, preparation.shape]
        stamp = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        return f"features-{re.sub(r'[^A-Za-z0-9.-]+', '-', folder.name)}-{self.pool}-{stamp}"


class FeatureInputs:
    """Opened features: row numbers in, float32 features out."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __call__(
        self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "b ..."]:
        """Features of ``rows``; the same with and without a generator."""
        return torch.from_numpy(self._rows[rows.numpy()]).float()


class _Computation:
    """Features of rows ``start`` to ``stop``; the backbone is loaded at the first call."""

    def __init__(
        self,
        view: Features,
        folder: Path,
        preparation: Preparation,
        column: Column,
        values: pa.ChunkedArray,
    ) -> None:
        self.view, self.folder, self.prepare, self.column, self.values = (
            view,
            folder,
            preparation,
            column,
            values,
        )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.backbone: Backbone | None = None

    def __call__(self, start: int, stop: int) -> Tensor:
        if self.backbone is None:
            backbone = frozen(self.folder, self.view.pool, self.view.tower)
            self.backbone = backbone.to(self.device, memory_format=torch.channels_last)
        step = self.view.batch_size or _BATCH[self.device.type]
        parts = [
            self._batch(self.backbone, first, min(first + step, stop)) for first in range(start, stop, step)
        ]
        return torch.cat(parts)

    def _batch(self, backbone: Backbone, start: int, stop: int) -> Tensor:
        x, mask = self._prepared(start, stop)
        if x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        enabled = self.view.precision == "bf16"
        with torch.inference_mode(), torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            features = backbone(x.to(self.device), None if mask is None else mask.to(self.device))
        result: Tensor = features.float().cpu()
        return result

    def _prepared(self, start: int, stop: int) -> Prepared:
        values = self.values.slice(start, stop - start).to_pylist()
        try:
            return self.prepare(values)
        except Exception:
            self._name_bad_value(start, values)
            raise

    def _name_bad_value(self, start: int, values: list[object]) -> None:
        for row, value in enumerate(values, start):
            try:
                self.prepare([value])
            except Exception as error:  # Pillow's decoders raise errors of many kinds
                path = value.get("path") if isinstance(value, dict) else None
                named = f" (path '{path}')" if path else ""
                raise DataError(
                    f"{place_of(self.column, row)}{named}: backbone '{self.view.backbone}' cannot read it: "
                    f"{' '.join(str(error).split())}; mend or leave out the row"
                ) from error
