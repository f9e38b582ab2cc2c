"""Segmentation: a decoder on a frozen encoder, trained on shares of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Self, cast

import torch
from jaxtyping import Float, UInt8
from pyarrow.types import is_binary, is_large_binary, is_struct
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.randomness import isolated
from polyfed.data.images import ImageFit
from polyfed.data.views.pixels import Masks
from polyfed.lab.downstream.bench import Bench
from polyfed.lab.downstream.fitting import DecoderFit, fit_decoder, logits_of
from polyfed.lab.downstream.maps import MappedPictures, MapReader
from polyfed.lab.downstream.probe import Probe, Share, require_apart
from polyfed.lab.downstream.results import Outcome, ProbeRow
from polyfed.losses.segmentation import focal_dice
from polyfed.tasks.metrics import mean_dice

_Side = Annotated[int, *Masks.model_fields["size"].metadata]  # bounds as those of the view


class SegmentationProbe(Probe):
    """Masks by a decoder on the maps of a frozen encoder (FedAID, arXiv 2404.03854, appendix B.2, after MGCA).

    A convolutional encoder gets a U-Net decoder with skip connections from all its resolutions, a transformer one
    that upsamples the grid of its patch tokens. Loss: ``focal_weight`` focal - ``dice_weight`` log(soft Dice).

    Metrics in percent: ``dice`` at a chance of 0.5, by picture, then the mean; an empty mask scores 1 if nothing is
    predicted, else 0. ``mean_mask`` is the Dice of predicting what is 1 in most of the masks trained on, for every
    picture: what a decoder must beat.
    """

    source: str = Field(description="name of a source")
    mask: str = Field(description="column of the masks: pictures, foreground bright")
    modality: str = Field(default="image", description="modality of the pictures")
    train: str = Field(default="train", description="split that shares are drawn from")
    validation: str | Share | None = Field(
        default="validation",
        description="for early stopping: a split, or a share of the training pictures held out; None: all epochs",
    )
    test: tuple[str, ...] = Field(default=("test",), min_length=1, description="splits that metrics are of, joined")
    shares: tuple[Share, ...] = Field(default=(0.1, 1.0), min_length=1, description="shares of the training pictures")
    draws: int = Field(default=5, ge=1, description="draws of each share, with seeds 42, 43, ...")
    decoder: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(512, 256, 128, 64), min_length=1, description="widths of the decoder's stages"
    )
    size: _Side | None = Field(default=None, description="side of the masks; None: of the encoder's pictures")
    focal_weight: float = Field(default=10.0, ge=0, description="weight of the focal loss")
    dice_weight: float = Field(default=1.0, ge=0, description="weight of -log(soft Dice)")
    gamma: float = Field(default=2.0, ge=0, description="of the focal loss")
    fit: DecoderFit = Field(default=DecoderFit(), description="of the decoder")
    memory: int = Field(default=1 << 30, ge=0, description="bytes of feature maps held; more are computed every epoch")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        hint = "give validation a share of train, such as 0.15, to test on the validation split too"
        require_apart(self.train, self.validation, self.test, hint)
        if not self.focal_weight + self.dice_weight:
            raise ValueError("focal_weight and dice_weight are both 0; give one of them a weight")
        return self

    def unsuitable(self, bench: Bench) -> str | None:
        """The model does not encode the modality, or not by position."""
        missing = bench.subject.lacks([self.modality])
        if missing is None and bench.subject.trunk(self.modality) is None:
            encoder = type(bench.subject.model.encoders[self.modality]).__name__
            return f"the encoder of '{self.modality}' ({encoder}) gives no features by position"
        return missing

    def check(self, bench: Bench, task: str) -> None:
        splits = [self.train, *self.test, *([self.validation] if isinstance(self.validation, str) else [])]
        bench.require(task, self.source, splits, [self.modality])
        for name in splits:
            self._require_masks(bench, task, name)
        self.feature_reader(bench, task)

    def run(self, bench: Bench, task: str) -> Outcome:
        reader, validation = self.feature_reader(bench, task), self.validation
        sets = _Sets(
            self.split_pictures(bench, task, [self.train], reader),
            self.split_pictures(bench, task, [validation], reader) if isinstance(validation, str) else None,
            self.split_pictures(bench, task, self.test, reader),
        )
        if not bool(sets.train.masks.any()):
            raise DataError(f"tasks.{task}: all masks '{self.mask}' of '{self.source}' {self.train} are empty")
        rows = []
        for share in self.shares:
            scores = [self._draw(bench, task, share, draw, reader, sets) for draw in range(bench.draws or self.draws)]
            values = {"dice": [each.dice for each in scores], "mean_mask": [each.mean_mask for each in scores]}
            facts = {"n": scores[0].trained, "n_train": len(sets.train), "n_test": len(sets.test)}
            facts |= {"held_out": scores[0].held} if isinstance(validation, float) else {}
            rows.append(ProbeRow(f"{100 * share:g} %", values, facts))
        how = f"skips at {', '.join(map(str, reader.sides))} px" if reader.modules else f"grid {reader.sides[0]}"
        data = f"{self.source}.{self.mask} at {self._size(bench, task)} px"
        return Outcome(data, rows, [f"Decoder: {how}. ± over draws."])

    def _size(self, bench: Bench, task: str) -> int:
        subject = bench.subject
        shape = subject.views[self.modality].spec(self.modality, subject.context).shape
        if self.size is None and len(shape) != 3:
            raise ConfigError(f"tasks.{task}.size: '{self.modality}' is no picture of known size; give the masks' side")
        return self.size or shape[1]

    def feature_reader(self, bench: Bench, task: str) -> MapReader:
        trunk = bench.subject.trunk(self.modality)
        assert trunk is not None
        samples = bench.samples(self.source, self.train, self.modality)
        example = samples.inputs[self.modality](samples.rows[self.modality][:1]).to(bench.subject.device)
        return MapReader.of(trunk, example, f"tasks.{task}, '{self.modality}'")

    def split_pictures(self, bench: Bench, task: str, splits: Sequence[str], reader: MapReader) -> MappedPictures:
        view = {self.mask: self._view(bench, task)}
        parts = [bench.samples(self.source, name, self.modality, lazy=view) for name in splits]
        masks = [part.lazy[self.mask](part.rows[self.mask]) for part in parts]
        return MappedPictures(parts, self.modality, torch.cat(masks), reader, bench.subject.device, self.memory)

    def _view(self, bench: Bench, task: str) -> Masks:
        # masks are resized or cropped as the pictures are
        view = bench.subject.views[self.modality].resolved(self.modality, bench.subject.context)
        fit = cast(ImageFit, getattr(view, "fit", "squash"))
        return Masks(size=self._size(bench, task), fit=fit)

    def _require_masks(self, bench: Bench, task: str, split: str) -> None:
        """Raise ConfigError if the column holds no pictures, DataError if one of them cannot be read."""
        column = bench.split(self.source, split).read(self.mask)
        if column.nested:
            raise DataError(f"tasks.{task}.mask: '{self.source}' {split}, '{self.mask}' holds lists; one mask an item")
        try:
            self._view(bench, task).open(column, self.mask, bench.subject.context)
        except DataError as error:
            kind = column.values.type
            if not (is_binary(kind) or is_large_binary(kind) or is_struct(kind)):
                reason = f"'{self.mask}' of '{self.source}' {split} holds {kind}, no pictures; name a column of masks"
                raise ConfigError(f"tasks.{task}.mask: {reason}") from error
            raise DataError(f"tasks.{task}.mask: {error}") from error

    def _draw(self, bench: Bench, task: str, share: float, draw: int, reader: MapReader, sets: _Sets) -> _Score:
        order = torch.randperm(len(sets.train), generator=bench.stream(task, draw, f"share {share:g}"))
        few = order[: max(2, round(share * len(order)))]
        # two are trained on at least; what else the share says is held out for early stopping
        count = min(round(self.validation * len(few)), len(few) - 2) if isinstance(self.validation, float) else 0
        held, few = few[:count], few[count:]
        watched, rows = (sets.train, held) if sets.validation is None else (sets.validation, sets.validation.all)
        # a decoder's initial weights depend on the draw and the share alone, not on which tasks came before
        with isolated(bench.seed + draw, "downstream", task, f"decoder {share:g}"):
            decoder = reader.decoder(self.decoder, sets.test.masks.shape[-1]).to(bench.subject.device)

            def validation() -> float:
                return float(self._loss(logits_of(decoder, watched, rows), watched.masks[rows]))

            stream = bench.stream(task, draw, f"order {share:g}")
            fit_decoder(decoder, sets.train, few, validation if len(rows) else None, self._loss, self.fit, stream)
        logits, truth = logits_of(decoder, sets.test, sets.test.all), sets.test.masks.bool()
        guess = (sets.train.masks[few].double().mean(0) > 0.5).expand_as(truth)
        return _Score(float(mean_dice(logits > 0, truth)), float(mean_dice(guess, truth)), len(few), len(held))

    def _loss(self, logits: Float[Tensor, "b h w"], masks: UInt8[Tensor, "b h w"]) -> Float[Tensor, ""]:
        return focal_dice(logits, masks, focal_weight=self.focal_weight, dice_weight=self.dice_weight, gamma=self.gamma)


class _Sets(NamedTuple):
    train: MappedPictures
    validation: MappedPictures | None
    test: MappedPictures


class _Score(NamedTuple):
    dice: float
    mean_mask: float
    trained: int
    held: int
