"""BYOL between two views of a batch, in addition to a task's own loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.settings import Settings
from polyfed.data.samples import Batch, Samples
from polyfed.losses.self_supervised import TargetNetwork, symmetric_byol
from polyfed.models.model import Embedder, Model


class Byol(Settings):
    """BYOL in addition to other losses."""

    weight: float = Field(default=1.0, gt=0, description="factor of BYOL")
    momentum: float = Field(default=0.99, ge=0, le=1, description="of the target network, at each step")
    predictor_width: int = Field(default=4096, ge=1, description="hidden width of the predictors")


class SecondViews:
    """BYOL on modalities whose training view is random, so that two draws of it differ (Grill et al. 2020).

    The target network starts as a copy of the model's encoders; second views are drawn from ``stream``.
    """

    def __init__(
        self, samples: Samples, names: Sequence[str], model: Model, momentum: float, stream: torch.Generator
    ) -> None:
        self.names, self._samples, self._stream = names, samples, stream
        self.target = TargetNetwork({name: model.tower(name) for name in names}, momentum)

    def loss(self, model: Embedder, predictors: Mapping[str, nn.Module] | nn.ModuleDict, batch: Batch) -> Tensor:
        """The symmetric loss between the batch and a second view of its samples, summed over modalities."""
        again = self._samples.batch(batch.index.cpu(), self._stream, self.names).to(batch.index.device)
        losses = list[Tensor]()
        for name in self.names:
            first, second, predictor = batch.inputs[name], again.having(name).inputs[name], predictors[name]
            if len(second) < 2:
                continue
            first = batch.having(name).inputs[name]
            predictions = predictor(model.embed(name, first)), predictor(model.embed(name, second))
            with torch.no_grad():
                targets = self.target[name](first), self.target[name](second)
            losses.append(symmetric_byol(predictions, targets))
        return torch.stack(losses or [batch.no_loss]).sum()


def random_views(samples: Samples) -> list[str]:
    """Modalities whose training view takes anything from its random stream."""
    names = []
    for name in samples.modalities:
        # no view states whether it is random: look whether making one moves the stream
        stream = torch.Generator()
        before = stream.get_state()
        rows = samples.rows[name]
        samples.inputs[name](rows[rows >= 0][:1], stream)
        if not torch.equal(before, stream.get_state()):
            names.append(name)
    return names
