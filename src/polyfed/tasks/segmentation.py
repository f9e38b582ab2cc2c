"""Segmentation: the class of every pixel of an image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

import torch
from jaxtyping import Float, Int64
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.settings import require_default
from polyfed.data.samples import Batch, Samples
from polyfed.data.view import View
from polyfed.data.views.pixels import Masks
from polyfed.losses.segmentation import cross_entropy_dice
from polyfed.models.decoders import MaskHead
from polyfed.models.model import Embedder, Model
from polyfed.models.towers import grid_side
from polyfed.tasks import evaluating
from polyfed.tasks.metrics import TaskScores, dice, dice_of_constant, iou, items_beside, overlaps, sole_best
from polyfed.tasks.task import AnySamples, Task


class Segmentation(Task):
    """Predict the class of every pixel of an image, by a decoder of the encoder's features by position.

    Features are the last map of a convolutional encoder or the patch tokens of a transformer; an encoder that gives a
    vector alone is refused. With two ``names`` a mask is the second class where it is above ``threshold``; with more,
    its values (of a palette, or grey) are numbers of classes. Samples without the image are left out.

    Metrics in percent: ``dice`` (primary) and ``iou``, means over classes, without the first unless ``background``;
    ``dice_<name>`` and ``iou_<name>`` of each. Pixels are counted over all images, not averaged by image. A class
    that is neither true nor predicted has no metric and is left out of means, which are 100 where that holds for all;
    one that is only predicted scores 0. ``dice_of_constant`` is the Dice of the best mask with one class everywhere.
    Further ``loss`` (cross-entropy, mean over pixels and then images), ``n`` images and ``classes``. Ties and NaN count
    against the model.
    """

    shapes_head: ClassVar[tuple[str, ...] | None] = ("names", "widths")

    target: str = Field(default="mask", description="column of the masks")
    modality: str = Field(default="image", description="modality of the images")
    names: tuple[str, ...] = Field(
        default=("background", "foreground"), min_length=2, max_length=256, description="names of the classes in order"
    )
    threshold: int = Field(default=127, ge=0, le=254, description="grey value above which a pixel is the second class")
    size: int | None = Field(default=None, ge=8, le=2048, description="side of the masks; None: that of the images")
    widths: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 32), min_length=1, description="channels of the decoder's stages, each of which doubles the side"
    )
    dice_over: Literal["batch", "picture"] = Field(default="batch", description="scope of Dice; DP-SGD needs picture")
    background: bool = Field(default=False, description="count the first class in means, and in the soft Dice")
    ignore: int | None = Field(default=None, ge=0, le=255, description="value of pixels to leave out, with 3+ names")

    @field_validator("names")
    @classmethod
    def _parts_of_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value) or not all(re.fullmatch(r"[\w-]+", name) for name in value):
            raise ValueError(f"names must be unique and of letters, digits, _ and -; got {list(value)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.names) == 2:
            require_default(self, "with two names", "ignore")
        else:
            require_default(self, "with more than two names", "threshold")
        if self.ignore is not None and self.ignore < len(self.names):
            raise ValueError(f"ignore is {self.ignore}, the number of class '{self.names[self.ignore]}'; name another")
        return self

    @property
    def class_targets(self) -> tuple[str, ...]:
        return ()  # masks are not labels of samples

    @property
    def compared(self) -> frozenset[str]:
        return frozenset([self.modality])

    @property
    def is_per_sample(self) -> bool:
        return self.dice_over == "picture"

    @property
    def primary(self) -> str:
        """``dice``."""
        return "dice"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See ``Task``."""
        own = [f"{metric}_{name}" for metric in ("dice", "iou") for name in self.names]
        return "dice", "iou", *own, "dice_of_constant", "loss", "n", "classes", "items"

    @property
    def target_views(self) -> Mapping[str, View]:
        if len(self.names) == 2:
            return {self.target: Masks(size=self.size, of=self.modality, threshold=self.threshold)}
        return {self.target: Masks(size=self.size, of=self.modality, classes=len(self.names), ignore=self.ignore)}

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The decoder.

        Raises:
            ConfigError: the samples have no such images.
            DataError: the samples are empty.
        """
        self._require(samples)
        side = samples.lazy[self.target](samples.rows[self.target][:1]).shape[-1]
        return MaskHead(dim, len(self.names), self.widths, side, self.modality)

    def require_model(self, model: Model, samples: Samples) -> None:
        """Raise ConfigError if the encoder does not give a grid of features for one image."""
        images = self.usable(samples)
        if not len(images):
            return  # which is refused where all clients are checked
        x = images.load(self.modality, images.rows[self.modality][:1]).to(model.device)
        with evaluating(model, inference=False):
            positions, mask = model.positions(self.modality, x)
        if (grid_side(positions, mask) or 0) < 2:
            encoder = type(model.encoders[self.modality]).__name__
            raise ConfigError(
                f"task 'segmentation' needs a square map of features, and the encoder of '{self.modality}' ({encoder}) "
                f"gives {positions.shape[1]} positions; choose resnet, vit or blocks on square images, or hf or "
                "projection with a view of pool: tokens"
            )

    def usable(self, samples: AnySamples) -> AnySamples:
        """Samples with the image."""
        return samples.having(self.modality)

    def loss(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Tensor:
        batch = self.usable(batch)
        if not len(batch):
            return batch.no_loss
        logits, masks = self._logits(model, head, batch), batch.targets[self.target]
        return cross_entropy_dice(logits, masks, over=self.dice_over, background=self.background)

    def scores(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Float[Tensor, "pixels c"]:
        """See ``Task``; a row for each pixel of the images."""
        return self._logits(model, head, self.usable(batch)).movedim(1, -1).flatten(0, 2)

    def evaluate(
        self, model: Embedder, head: nn.Module | None, samples: Samples, *, batch_size: int
    ) -> dict[str, float]:
        """Metrics of all images; three numbers for each image and class are kept, not the predictions.

        Raises:
            ConfigError: the samples have no such images.
            DataError: the samples are empty.
        """
        self._require(samples)
        samples, classes = self.usable(samples), len(self.names)
        outcomes = []
        with evaluating(model, head):
            for batch in (batch.to(model.device) for batch in samples.batches(batch_size)):
                logits, masks = self._logits(model, head, batch).float(), batch.targets[self.target].int()
                loss = cross_entropy_dice(logits, masks, dice_weight=0.0)
                outcomes.append((overlaps(sole_best(logits), masks, classes), (loss * len(batch))[None]))
        # left on the device until here, so that no batch waits for a GPU
        counts, losses = (torch.cat(part).cpu() for part in zip(*outcomes, strict=True))
        metrics = self._overlaps(counts.sum(0))
        metrics |= {"loss": float(losses.double().sum()) / len(counts), "n": float(len(counts))}
        metrics |= {"classes": float(classes)} | items_beside(samples)
        return TaskScores(metrics, {"dice": self._dice_by_item(counts, samples.items)})

    def _logits(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Float[Tensor, "b c h w"]:
        positions = self.by_position(model, "positions")(self.modality, batch.inputs[self.modality])[0]
        logits: Tensor = self.require_head(head)(positions)
        return logits

    def _overlaps(self, counts: Int64[Tensor, "c 3"]) -> dict[str, float]:
        metrics = {}
        for metric, each in (("dice", 100.0 * dice(counts)), ("iou", 100.0 * iou(counts))):
            metrics[metric] = float(each[self._first :].nanmean().nan_to_num(100.0))
            metrics |= {f"{metric}_{self.names[k]}": float(each[k]) for k in (~each.isnan()).nonzero()[:, 0].tolist()}
        return metrics | {"dice_of_constant": 100.0 * float(dice_of_constant(counts, self._first))}

    def _dice_by_item(self, counts: Int64[Tensor, "n c 3"], items: Int64[Tensor, " n"]) -> list[Tensor]:
        """Terms of each item in the mean over classes: a Dice is one sum over images, divided by another."""
        mine = counts.new_zeros(int(items.max()) + 1, *counts.shape[1:]).index_add(0, items, counts).double()
        chosen = [k for k in range(self._first, len(self.names)) if bool(counts[:, k].any())]
        return [torch.stack([200.0 / len(chosen) * mine[:, k, 0], mine[:, k, 1] + mine[:, k, 2]]) for k in chosen]

    @property
    def _first(self) -> int:
        """First class that counts in means."""
        return 0 if self.background else 1

    def _require(self, samples: Samples) -> None:
        self.require_modalities([self.modality], samples.modalities, "modality")
        if not len(self.usable(samples)):
            raise DataError(f"no '{self.modality}' to segment; enlarge this participant's share of the data")
