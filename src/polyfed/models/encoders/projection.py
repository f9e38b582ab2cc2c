"""Projection of cached features: what is left to train on top of a frozen backbone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.features import Features
from polyfed.models.encoder import Encoder, feature_shape
from polyfed.models.towers import PIE, masked_mean


class FeatureProjection(Encoder):
    """Features [b, f], standardised if wanted, dropout, a linear layer or an MLP with one hidden layer to d.

    Features by position [b, l, f] are averaged over their positions, and with ``pie`` attended to as well;
    positions that are all zero are padding.
    """

    view: SerializeAsAny[View] = Features()
    standardise: Literal["none", "batch", "layer"] = Field(
        default="layer", description="per sample, per feature over the batches (both without affine), or not at all"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the features dropped in training")
    hidden: int | None = Field(default=None, ge=1, description="width of a hidden layer (GELU); none by default")
    pie: bool = Field(default=False, description="attention over positions (PVSE); needs features by position")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps features [b, f] or [b, l, f] to [b, dim].

        Raises:
            ConfigError: the view gives no features, or ``pie`` has no positions to attend to.
        """
        shape = feature_shape(spec, "projection", positions=self.pie)
        return _ProjectionModule(self, shape[-1], dim)


class _ProjectionModule(nn.Module):
    def __init__(self, settings: FeatureProjection, width: int, dim: int) -> None:
        super().__init__()
        inner: list[nn.Module] = []
        if settings.hidden is not None:
            inner = [nn.Linear(width, settings.hidden), nn.GELU(), nn.Dropout(settings.dropout)]
        standardisers: dict[str, Callable[[], nn.Module]] = {
            "batch": lambda: _FeatureNorm(width),
            "layer": lambda: nn.LayerNorm(width, elementwise_affine=False),
            "none": nn.Identity,
        }
        self.standardise = standardisers[settings.standardise]()
        self.project = nn.Sequential(nn.Dropout(settings.dropout), *inner, nn.Linear(settings.hidden or width, dim))
        self.pie = PIE(width, dim) if settings.pie else None

    def forward(self, x: Float[Tensor, "b ... f"]) -> Float[Tensor, "b d"]:
        mask = (x != 0).any(-1) if x.dim() == 3 else None
        pooled = x if mask is None else masked_mean(x, mask)
        out: Tensor = self.project(self.standardise(pooled))
        return out if self.pie is None else self.pie(out, x, mask)


class _FeatureNorm(nn.BatchNorm1d):
    """Batch normalisation without affine; a training batch of one sample uses the running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__(width, affine=False)

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[0] > 1:
            return super().forward(input)
        return F.batch_norm(input, self.running_mean, self.running_var, eps=self.eps)
