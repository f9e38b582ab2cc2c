"""The model of a party: one encoder a modality, and the heads of its tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from jaxtyping import Float
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.data.view import DataContext
from polyfed.models.encoder import Encoder
from polyfed.settings import Settings


class ModelSettings(Settings):
    """Architecture of a party's model."""

    dim: int = Field(default=256, ge=1, description="width d of the representations; equal for all who exchange them")
    encoders: dict[str, SerializeAsAny[Encoder]] = Field(description="modality -> encoder")

    @property
    def architecture(self) -> str:
        """A name for this architecture: equal for equal settings, readable, and safe to show to the server."""
        digest = hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:8]
        parts = "+".join(f"{modality}-{encoder.component_name()}" for modality, encoder in self.encoders.items())
        return f"{parts}-d{self.dim}-{digest}"

    def build(self, heads: Mapping[str, nn.Module], context: DataContext) -> Model:
        """Build encoders from these settings and join them with ``heads``."""
        encoders = {
            modality: encoder.build(self.dim, encoder.view.spec(modality, context), context)
            for modality, encoder in self.encoders.items()
        }
        return Model(encoders, heads, self.dim)


class Model(nn.Module):
    """Encoders by modality and heads by name; nothing compares their names.

    Parameters are called ``encoders.<modality>.*`` and ``heads.<name>.*``.
    """

    def __init__(self, encoders: Mapping[str, nn.Module], heads: Mapping[str, nn.Module], dim: int) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.heads = nn.ModuleDict(heads)
        self.dim = dim

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the modalities that this model encodes."""
        return tuple(self.encoders)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def embed(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        """Embedding before normalisation; what a classifier head takes."""
        embedding: Tensor = self.encoders[modality](x)
        return embedding

    def represent(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        """Representation: the embedding with unit L2 norm (in fp32 also under autocast)."""
        return F.normalize(self.embed(modality, x).float(), dim=-1)
