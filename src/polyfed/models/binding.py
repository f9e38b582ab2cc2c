"""Features of one encoder under the align modules of another: FedAID's local, anchor and distorted representations."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from polyfed.models.aligner import ALIGNER, POSITIONS, Aligner, Detail, aligned
from polyfed.models.model import CachedEmbedder, LastValues, Model
from polyfed.models.slots import EXTRA, HEAD, TensorSlots
from polyfed.models.towers import LocalFeatures, Positions

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class EncoderFeatures(LastValues[LocalFeatures]):
    """Features of a batch by a model's trunks, each input encoded only once; made for the batch, then dropped.

    ``frozen``: without gradient.
    """

    def __init__(self, model: Model, *, frozen: bool = False) -> None:
        encoders, self.device = aligned(model.encoders), model.device

        def features(modality: str, x: Tensor) -> LocalFeatures:
            # a frozen trunk keeps no graph: half the memory of a second encoder
            with torch.no_grad() if frozen else nullcontext():
                return cast("LocalFeatures", encoders[modality].trunk(x))

        super().__init__(features)


class Bound(CachedEmbedder):
    """Embeddings that given align modules make of given features; tasks take it as a model."""

    def __init__(self, features: EncoderFeatures, aligners: Mapping[str, Aligner]) -> None:
        def embed(modality: str, x: Tensor) -> Tensor:
            embedding: Tensor = aligners[modality](features(modality, x))
            return embedding

        def detail(modality: str, x: Tensor) -> Detail:
            return aligners[modality].detail(features(modality, x))

        def positions(modality: str, x: Tensor) -> Positions:
            made = detail(modality, x)
            return made.positions, made.mask

        super().__init__(embed, positions, detail)
        self.device = features.device


class Parts:
    """Names of a model's tensors by part: encoders (Theta), align modules (theta), and others.

    Others serve tasks alone: their heads, and the align modules' heads for positions.
    """

    def __init__(self, slots: TensorSlots) -> None:
        roles = {name: own.slot.role for name, own in slots.items()}
        self.aligner = tuple(name for name, role in roles.items() if role == ALIGNER)
        self.others = tuple(name for name, role in roles.items() if role in (HEAD, EXTRA, POSITIONS))
        self.without_encoder = (*self.aligner, *self.others)
        # all other roles are an encoder's
        self.encoder = tuple(n for n, role in roles.items() if role not in (ALIGNER, HEAD, EXTRA, POSITIONS))


def aligners_of(model: Model) -> dict[str, Aligner]:
    return {name: encoder.aligner for name, encoder in aligned(model.encoders).items()}


def frozen_aligners(model: Model, weights: Mapping[str, Tensor], *, training: bool = True) -> dict[str, Aligner]:
    """Copies of a model's align modules with other weights, which do not learn; gradient passes through them.

    Args:
        model: model with the align modules.
        weights: names as in the model's state dict -> tensors; those of other parts are ignored. Heads for positions,
            which no teacher has, are the model's own if they are absent.
        training: see ``frozen_copy``. Use it next to modules in training mode: equal weights then agree up to
            dropout.
    """
    made = {}
    for modality, aligner in aligners_of(model).items():
        prefix = f"encoders.{modality}.aligner."
        made[modality] = frozen_copy(aligner, training=training)
        given = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        # no teacher is learnt for heads of positions
        own = {name: value for name, value in made[modality].state_dict().items() if name.startswith("local.")}
        made[modality].load_state_dict(own | given)
    return made


def frozen_copy(module: AnyModule, *, training: bool = False) -> AnyModule:
    """A copy that does not learn, in evaluation mode.

    Or in ``training`` mode: batch norms go by the batch, and dropout draws; running statistics stay as they are.
    """
    made = copy.deepcopy(module).train(training).requires_grad_(False)
    for part in made.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            # in training mode a batch norm would move its running statistics even without gradient
            part.momentum = 0.0
    return made
