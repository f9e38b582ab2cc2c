"""MGCA's objective (Wang et al., NeurIPS 2022): alignment of samples, of tokens, and of prototypes."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings, require_default
from polyfed.data.samples import Batch, Samples
from polyfed.losses.info_nce import Reduction, info_nce
from polyfed.losses.local_alignment import prototype_alignment, token_alignment, token_weights, uniform_weights
from polyfed.models.aligner import Aligned, Detail
from polyfed.models.model import Embedder, Model
from polyfed.tasks.pairing import PairTask


class InstanceAlignment(Settings):
    """InfoNCE on the embeddings, summed over the two directions."""

    weight: float = Field(default=1.0, gt=0, description="factor in the sum of the three")
    temperature: float = Field(default=0.07, ge=0.01, le=1.0, description="a higher one softens the contrast")


class TokenAlignment(Settings):
    """Each token against the others of its sample, by what it attends to in the other modality."""

    weight: float = Field(default=0.7, gt=0, description="factor in the sum of the three")
    temperature: float = Field(default=0.1, ge=0.01, le=1.0, description="a higher one softens attention and contrast")
    weights: Literal["attention", "uniform"] = Field(
        default="attention", description="of tokens within a sample: how the summary attends to them, or all alike"
    )


class PrototypeAlignment(Settings):
    """Each side of a sample predicts to which prototypes the other belongs."""

    weight: float = Field(default=1.0, gt=0, description="factor in the sum of the three")
    temperature: float = Field(default=0.2, ge=0.01, le=1.0, description="a higher one softens the prediction")
    epsilon: float = Field(default=0.05, gt=0, le=10, description="Sinkhorn: a higher one softens the assignments")
    iterations: int = Field(
        default=3, ge=1, le=1000, description="Sinkhorn: scalings; more use the prototypes more alike"
    )


class MGCA(PairTask):
    """Weighted sum of three alignments; metrics, which are of the embeddings alone, as ``PairTask`` says.

    Written after the paper and its released code, of which the default is kept: tokens attend without weights of their
    own (the option of learnt attention layers is left out). Padding never counts as a negative, pieces of a word are
    tokens of their own, and the weight of prototypes is that of the released command line (0.5 in its constructor).
    """

    shapes_head: ClassVar[tuple[str, ...] | None] = ("prototypes", "freeze_prototypes_steps")

    instances: InstanceAlignment | None = Field(default=InstanceAlignment(), description="of samples; null: none")
    tokens: TokenAlignment | None = Field(default=TokenAlignment(), description="of tokens; null: none")
    assignments: PrototypeAlignment | None = Field(
        default=PrototypeAlignment(), description="of prototypes; null: none"
    )
    prototypes: int = Field(default=500, ge=2, description="number of prototypes")
    freeze_prototypes_steps: int = Field(
        default=100, ge=0, description="training steps in which prototypes stay as drawn (MGCA: the first epoch)"
    )

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.instances or self.tokens or self.assignments):
            raise ValueError("instances, tokens and assignments are all null, so there is nothing to learn; set one")
        if self.assignments is None:
            require_default(self, "with assignments: null", "prototypes", "freeze_prototypes_steps")
        return self

    @property
    def contrast_reduction(self) -> Reduction:
        return "sum"

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The prototypes.

        Raises:
            ConfigError: the samples lack one of the two modalities.
        """
        self.require(samples)
        return PrototypeLayer(self.prototypes, dim, frozen_steps=self.freeze_prototypes_steps)

    def require_model(self, model: Model, samples: Samples) -> None:
        """Raise ConfigError if the model gives no features by position, or no attention to them where it is needed."""
        self.require_detail(model)
        if self.tokens is not None and self.tokens.weights == "attention":
            for modality in self.between:
                if not isinstance(model.encoders[modality], Aligned):
                    raise _no_attention(modality)

    def pair_loss(self, model: Embedder, head: nn.Module | None, pairs: Batch) -> Tensor:
        """Weighted sum of the three alignments.

        Raises:
            ConfigError: the model gives no features by position, or no attention to them where that is wanted.
        """
        if not isinstance(head, PrototypeLayer):
            raise TypeError("mgca needs the module that its head() made")
        sides = self.detail(model, pairs)  # one pass of each encoder for all three terms
        u, v = (F.normalize(side.embedding.float(), dim=-1) for side in sides)
        parts = []
        if self.instances is not None:
            scale, siblings = 1 / self.instances.temperature, self.siblings(pairs)
            parts.append(self.instances.weight * info_nce(u, v, scale, siblings, reduction=self.contrast_reduction))
        if self.tokens is not None:
            parts.append(self.tokens.weight * self._token_loss(self.tokens, sides))
        if self.assignments is not None:
            settings = self.assignments.temperature, self.assignments.epsilon, self.assignments.iterations
            parts.append(self.assignments.weight * prototype_alignment(u, v, head(), *settings))
        return torch.stack(parts).sum()

    def _token_loss(self, settings: TokenAlignment, sides: tuple[Detail, Detail]) -> Tensor:
        """Each modality once as the one that attends."""
        losses = []
        for modality, own, other in zip(self.between, sides, reversed(sides), strict=True):
            if settings.weights == "uniform":
                weights = uniform_weights(own.positions, own.mask)
            elif own.attention is None:
                raise _no_attention(modality)
            else:
                weights = token_weights(own.attention, own.mask)
            tau = settings.temperature
            losses.append(token_alignment(own.positions, other.positions, weights, own.mask, other.mask, tau))
        return losses[0] + losses[1]


def _no_attention(modality: str) -> ConfigError:
    return ConfigError(
        f"task.tokens.weights is attention, but the encoder of '{modality}' does not say how its summary attends to "
        "positions; set model.aligner with local, or tokens: {weights: uniform}"
    )


class PrototypeLayer(nn.Module):
    """Prototypes [k, d], constants during the first training steps.

    ``steps`` counts the calls in training mode with gradients. It is a buffer, and so part of a model's weights: it is
    sent, kept and averaged with them, and the mean of the clients' counts is the number of steps that the averaged
    prototypes stand for. A method that computes the loss several times a step counts each.
    """

    steps: Tensor

    def __init__(self, count: int, dim: int, *, frozen_steps: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.normalize(torch.randn(count, dim), dim=-1))
        self.frozen_steps = frozen_steps
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self) -> Float[Tensor, "k d"]:
        # evaluation counts no steps
        if not (self.training and torch.is_grad_enabled()):
            return self.weight
        # chosen on the device: to ask for the count would make every step wait for a GPU
        weight = torch.where(self.steps < self.frozen_steps, self.weight.detach(), self.weight)
        self.steps += 1
        return weight
