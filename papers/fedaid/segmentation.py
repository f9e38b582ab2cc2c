"""Masks by a decoder on the feature maps of a frozen encoder, from small shares of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, Self, cast

import torch
from jaxtyping import Float, Int64, UInt8
from pyarrow.types import is_binary, is_large_binary, is_struct
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.randomness import isolated
from polyfed.core.settings import Settings
from polyfed.data.backbones import channels_last
from polyfed.data.images import ImageFit
from polyfed.data.samples import Samples
from polyfed.data.views.pixels import Masks
from polyfed.lab.downstream.probe import Bench, Outcome, Probe, ProbeRow, Share, require_apart
from polyfed.losses.segmentation import focal_dice
from polyfed.models.decoders import GridDecoder, UNetDecoder
from polyfed.models.towers import LocalFeatures, grid_side, to_map
from polyfed.tasks.metrics import mean_dice

_Outputs = dict[str, Float[Tensor, "b c h w"]]


@dataclass(frozen=True)
class MapReader:
    """Reader of a trunk's feature maps.

    Attributes:
        trunk: Input -> ``LocalFeatures``, in evaluation mode.
        modules: Names of the modules whose outputs are the maps, the coarsest first; empty for a grid of positions.
        channels: Channels of the maps.
        sides: Heights of the maps.
    """

    trunk: nn.Module
    modules: tuple[str, ...]
    channels: tuple[int, ...]
    sides: tuple[int, ...]

    @classmethod
    def of(cls, trunk: nn.Module, example: Tensor, what: str) -> MapReader:
        """Reader of a trunk, from one batch.

        A convolutional trunk's positions are those of its last map: then every resolution has a map, that of its last
        module. Other positions are a square grid of tokens, with or without a summary before them (frozen features of
        a transformer begin with one).

        Raises:
            ConfigError: The positions are not a square grid, or not those of a map although there are finer ones.
        """
        outputs, local = _watched(trunk, example)
        maps = _by_resolution(outputs, local)
        if maps:
            shapes = [value.shape for value in maps.values()]
            return cls(trunk, tuple(maps), tuple(s[1] for s in shapes), tuple(s[2] for s in shapes))
        return cls(trunk, (), (local.local.shape[-1],), (_grid_side(trunk, outputs, local, what),))

    @torch.no_grad()
    def __call__(self, x: Tensor) -> list[Float[Tensor, "b c h w"]]:
        """Maps of a batch, the coarsest first."""
        if not self.modules:
            local: LocalFeatures = self.trunk(x)
            return [to_map(local.local)]
        outputs, _ = _watched(self.trunk, x, self.modules)
        return [outputs[name] for name in self.modules]

    def decoder(self, widths: Sequence[int], size: int) -> nn.Module:
        """A new decoder for these maps: U-Net for several, upsampling for a grid; draws from the global generator."""
        made = UNetDecoder(self.channels, widths, size) if self.modules else GridDecoder(self.channels[0], widths, size)
        return channels_last(made)  # half the time of the default layout on a CPU


@torch.no_grad()
def _watched(trunk: nn.Module, x: Tensor, names: Sequence[str] | None = None) -> tuple[_Outputs, LocalFeatures]:
    """Outputs [b, c, h, w] of modules, in the order in which these end, and of the trunk."""
    outputs: _Outputs = {}

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 4 and output.is_floating_point():
            outputs.pop(name, None)  # a module that runs twice counts at its last time
            outputs[name] = output

    watched = {name: module for name, module in trunk.named_modules() if names is None or name in names}
    handles = [module.register_forward_hook(partial(note, name)) for name, module in watched.items()]
    try:
        local: LocalFeatures = trunk(x)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, local


def _by_resolution(outputs: _Outputs, local: LocalFeatures) -> _Outputs:
    """The last map of the trunk's positions, then the last of every finer resolution; empty without such a map.

    Coarser maps, such as pooled ones, are left out.
    """
    coarsest = next((name for name, value in reversed(outputs.items()) if _is_last_map(local, value)), None)
    if coarsest is None:
        return {}
    count = _count(outputs[coarsest])
    finer = {tuple(value.shape[-2:]): (name, value) for name, value in outputs.items() if _count(value) > count}
    ordered = sorted(finer.values(), key=lambda entry: _count(entry[1]))
    return {coarsest: outputs[coarsest], **dict(ordered)}


def _grid_side(trunk: nn.Module, outputs: _Outputs, local: LocalFeatures, what: str) -> int:
    count = local.local.shape[1]
    # a transformer's patches are as many as its tokens, so a finer convolution is a convolutional trunk's
    convolved = [value for name, value in outputs.items() if isinstance(trunk.get_submodule(name), nn.Conv2d)]
    finer = dict.fromkeys("x".join(map(str, value.shape[-2:])) for value in convolved if _count(value) > count)
    if finer:
        raise ConfigError(
            f"{what}: the trunk has maps of {', '.join(finer)}, but its {count} positions are the output of none "
            "of its modules, so a decoder would miss them; let a module give the last map as it is"
        )
    side = grid_side(local.local, local.mask)
    if side is None:
        raise ConfigError(
            f"{what}: {count} positions are not a square grid, so there are no maps to segment; give images"
        )
    return side


def _count(value: Float[Tensor, "b c h w"]) -> int:
    return value.shape[-2:].numel()


def _is_last_map(local: LocalFeatures, last: Float[Tensor, "b c h w"]) -> bool:
    flat = last.flatten(2).transpose(1, 2)
    return flat.shape == local.local.shape and torch.equal(flat, local.local)


class MappedImages:
    """Images of one or more splits, their masks and maps; maps are kept if they need at most ``memory``.

    Args:
        parts: Samples of each split.
        modality: Modality of the images.
        masks: Masks of all parts, in order [n, h, w].
        reader: Reader of the maps.
        device: Device of maps and masks.
        memory: Bytes of maps to hold at most; otherwise the encoder runs again for every batch.
    """

    def __init__(
        self,
        parts: Sequence[Samples],
        modality: str,
        masks: UInt8[Tensor, "n h w"],
        reader: MapReader,
        device: torch.device,
        memory: int,
    ) -> None:
        self._parts, self._modality, self._reader, self.device = parts, modality, reader, device
        self.masks = masks
        self.all = torch.arange(len(masks))
        self._held: list[Tensor] | None = None
        bytes_each = sum(4 * c * side**2 for c, side in zip(reader.channels, reader.sides, strict=True))
        # a frozen encoder gives the same maps in every epoch
        if bytes_each * len(masks) <= memory:
            computed = [[x.cpu() for x in self._computed(index)] for index in torch.split(self.all, 64)]
            self._held = [torch.cat(values) for values in zip(*computed, strict=True)]

    def __len__(self) -> int:
        return len(self.masks)

    def maps(self, index: Int64[Tensor, " b"]) -> list[Float[Tensor, "b c h w"]]:
        """Feature maps of some images, on the device.

        Raises:
            DataError: The encoder returns NaN or infinity.
        """
        maps = self._computed(index) if self._held is None else [held[index].to(self.device) for held in self._held]
        return [values.contiguous(memory_format=torch.channels_last) for values in maps]

    def truth(self, index: Int64[Tensor, " b"]) -> UInt8[Tensor, "b h w"]:
        return self.masks[index].to(self.device)

    def _computed(self, index: Int64[Tensor, " b"]) -> list[Tensor]:
        inputs, positions, start = [], [], 0
        for samples in self._parts:
            mine = ((index >= start) & (index < start + len(samples))).nonzero().squeeze(1)
            if len(mine):
                samples.require_all(self._modality, "feature maps")
                rows = samples.rows[self._modality][index[mine] - start]
                inputs.append(samples.inputs[self._modality](rows))
                positions.append(mine)
            start += len(samples)
        images = torch.cat(inputs)[torch.cat(positions).argsort()].to(self.device)
        maps = [value.float() for value in self._reader(images)]
        if not all(bool(value.isfinite().all()) for value in maps):
            raise DataError(f"feature maps of '{self._modality}' hold NaN or infinity: the model has diverged")
        return maps


class DecoderFit(Settings):
    """How a decoder is trained: AdamW, mini-batches, stopped early where there are validation data."""

    lr: float = Field(default=2e-4, gt=0, description="learning rate of AdamW")
    weight_decay: float = Field(default=0.05, ge=0, description="weight decay of AdamW")
    epochs: int = Field(default=50, ge=1, description="most epochs")
    patience: int = Field(default=10, ge=1, description="epochs without a lower validation loss")
    batch_size: int = Field(default=8, ge=2, description="images per step")


def fit_decoder(
    decoder: nn.Module,
    images: MappedImages,
    train: Int64[Tensor, " n"],
    validation: Callable[[], float] | None,
    loss: Callable[[Tensor, Tensor], Tensor],
    fit: DecoderFit,
    generator: torch.Generator,
) -> None:
    """Train a decoder (maps -> logits) in place; with validation it ends as it was at its lowest validation loss.

    Args:
        decoder: Decoder to train.
        images: Images to train on.
        train: Positions of the training images, shuffled by ``generator``.
        validation: gives the validation loss of the decoder as it is; training ends when it has not fallen for
            ``fit.patience`` epochs, of which NaN is one. None: all epochs.
        loss: Loss of logits and masks.
        fit: optimiser and length.
        generator: Generator of the order of the images.
    """
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=fit.lr, weight_decay=fit.weight_decay)
    best: dict[str, Tensor] = {}
    lowest, waited = math.inf, 0
    for _ in range(fit.epochs):
        decoder.train()
        parts = torch.split(train[torch.randperm(len(train), generator=generator)], fit.batch_size)
        for index in parts:
            if len(index) > 1 or len(parts) == 1:  # batch norms need more than one image
                optimizer.zero_grad()
                loss(decoder(images.maps(index)).squeeze(1), images.truth(index)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        if validation is None:
            continue
        waited += 1
        # NaN is below nothing, so a diverged epoch counts as waiting
        if (value := validation()) < lowest:
            lowest, waited = value, 0
            best = {name: tensor.detach().clone() for name, tensor in decoder.state_dict().items()}
        if waited >= fit.patience:
            break
    if best:
        decoder.load_state_dict(best)


@torch.no_grad()
def logits_of(
    decoder: nn.Module, images: MappedImages, index: Int64[Tensor, " n"], batch: int = 64
) -> Float[Tensor, "n h w"]:
    """Logits of some images in evaluation mode, on the CPU."""
    decoder.eval()
    return torch.cat([decoder(images.maps(part)).squeeze(1).float().cpu() for part in torch.split(index, batch)])


_Side = Annotated[int, *Masks.model_fields["size"].metadata]  # bounds as those of the view


class SegmentationProbe(Probe):
    """Masks by a decoder on the maps of a frozen encoder (FedAID, arXiv 2404.03854, appendix B.2, after MGCA).

    A convolutional encoder gets a U-Net decoder with skip connections from all its resolutions, a transformer one
    that upsamples the grid of its patch tokens. Loss: ``focal_weight`` focal - ``dice_weight`` log(soft Dice).

    Metrics in percent: ``dice`` at a chance of 0.5, by image, then the mean; an empty mask scores 1 if nothing is
    predicted, else 0. ``mean_mask`` is the Dice of predicting, for every image, the pixels that are 1 in most of the
    training masks: the baseline of a decoder.
    """

    source: str = Field(description="name of a source")
    mask: str = Field(description="column of the masks: images, foreground bright")
    modality: str = Field(default="image", description="modality of the images")
    train: str = Field(default="train", description="split that shares are drawn from")
    validation: str | Share | None = Field(
        default="validation",
        description="for early stopping: a split, or a share of the training images held out; None: all epochs",
    )
    test: tuple[str, ...] = Field(default=("test",), min_length=1, description="splits that metrics are of, joined")
    shares: tuple[Share, ...] = Field(default=(0.1, 1.0), min_length=1, description="shares of the training images")
    draws: int = Field(default=5, ge=1, description="draws of each share, with seeds 42, 43, ...")
    decoder: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(512, 256, 128, 64), min_length=1, description="widths of the decoder's stages"
    )
    size: _Side | None = Field(default=None, description="side of the masks; None: of the encoder's images")
    focal_weight: float = Field(default=10.0, ge=0, description="weight of the focal loss")
    dice_weight: float = Field(default=1.0, ge=0, description="weight of -log(soft Dice)")
    gamma: float = Field(default=2.0, ge=0, description="gamma of the focal loss")
    fit: DecoderFit = Field(default=DecoderFit(), description="training of the decoder")
    memory: int = Field(default=1 << 30, ge=0, description="bytes of feature maps held; more are computed every epoch")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        hint = "give validation a share of train, such as 0.15, to test on the validation split too"
        require_apart(self.train, self.validation, self.test, hint)
        if not self.focal_weight + self.dice_weight:
            raise ValueError("focal_weight and dice_weight are both 0; give one of them a weight")
        return self

    def unsuitable(self, bench: Bench) -> str | None:
        """Reason: the model does not encode the modality, or not by position."""
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
            self.split_images(bench, task, [self.train], reader),
            self.split_images(bench, task, [validation], reader) if isinstance(validation, str) else None,
            self.split_images(bench, task, self.test, reader),
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
            raise ConfigError(
                f"tasks.{task}.size: '{self.modality}' is not an image of known size; give the masks' side"
            )
        return self.size or shape[1]

    def feature_reader(self, bench: Bench, task: str) -> MapReader:
        trunk = bench.subject.trunk(self.modality)
        assert trunk is not None
        samples = bench.samples(self.source, self.train, self.modality)
        example = samples.inputs[self.modality](samples.rows[self.modality][:1]).to(bench.subject.device)
        return MapReader.of(trunk, example, f"tasks.{task}, '{self.modality}'")

    def split_images(self, bench: Bench, task: str, splits: Sequence[str], reader: MapReader) -> MappedImages:
        view = {self.mask: self._view(bench, task)}
        parts = [bench.samples(self.source, name, self.modality, lazy=view) for name in splits]
        masks = [part.lazy[self.mask](part.rows[self.mask]) for part in parts]
        return MappedImages(parts, self.modality, torch.cat(masks), reader, bench.subject.device, self.memory)

    def _view(self, bench: Bench, task: str) -> Masks:
        # masks are resized or cropped as the images are
        view = bench.subject.views[self.modality].resolved(self.modality, bench.subject.context)
        fit = cast(ImageFit, getattr(view, "fit", "squash"))
        return Masks(size=self._size(bench, task), fit=fit)

    def _require_masks(self, bench: Bench, task: str, split: str) -> None:
        """Raise ConfigError if the column does not hold images, DataError if one of them is unreadable."""
        column = bench.split(self.source, split).read(self.mask)
        if column.nested:
            raise DataError(f"tasks.{task}.mask: '{self.source}' {split}, '{self.mask}' holds lists; one mask an item")
        try:
            self._view(bench, task).open(column, self.mask, bench.subject.context)
        except DataError as error:
            form = column.values.type
            if not (is_binary(form) or is_large_binary(form) or is_struct(form)):
                reason = f"'{self.mask}' of '{self.source}' {split} holds {form}, not images; name a column of masks"
                raise ConfigError(f"tasks.{task}.mask: {reason}") from error
            raise DataError(f"tasks.{task}.mask: {error}") from error

    def _draw(self, bench: Bench, task: str, share: float, draw: int, reader: MapReader, sets: _Sets) -> _Score:
        order = torch.randperm(len(sets.train), generator=bench.stream(task, draw, f"share {share:g}"))
        few = order[: max(2, round(share * len(order)))]
        # at least two are trained on; the share of the others is held out for early stopping
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
    train: MappedImages
    validation: MappedImages | None
    test: MappedImages


class _Score(NamedTuple):
    dice: float
    mean_mask: float
    trained: int
    held: int
