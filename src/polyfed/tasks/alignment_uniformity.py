"""A task without labels and without a second modality: noisy views of one thing agree, different things spread."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch, Samples
from polyfed.losses.self_supervised import alignment, uniformity
from polyfed.models.model import Embedder, Model
from polyfed.tasks import evaluating
from polyfed.tasks.task import Task

_MOST = 2048  # test samples: all are compared with all


class AlignmentUniformity(Task):
    """Alignment and uniformity (Wang and Isola, ICML 2020) between two passes of a batch, averaged over modalities.

    The encoder reads the batch twice, and its dropout is the noise between the two (SimCSE, Gao et al. 2021). Samples
    of equal ``matches``, such as captions of one picture, are views of the same thing too. It needs neither labels nor
    a second modality: clients with pictures without captions, or captions without pictures.

    Metrics, in evaluation mode on the first 2,048 samples: ``<modality>_alignment``, ``<modality>_uniformity``, and
    ``agreement`` (primary), the negative loss.
    """

    shapes_head: ClassVar[tuple[str, ...] | None] = ()

    uniformity: float = Field(default=1.0, ge=0, description="weight of the uniformity beside the alignment")

    @property
    def primary(self) -> str:
        """``agreement``."""
        return "agreement"

    def head(self, dim: int, samples: Samples) -> nn.Module | None:
        return None

    def require_model(self, model: Model, samples: Samples) -> None:
        """Raise ConfigError if an encoder has no dropout: both passes of a sample would be the same."""
        for modality in model.modalities:
            rates = [part.p for part in model.tower(modality).modules() if isinstance(part, nn.Dropout)]
            if not any(rates):
                raise ConfigError(
                    f"task alignment_uniformity compares two noisy passes, but the '{modality}' encoder has no "
                    "dropout; set its dropout above 0"
                )

    def loss(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Tensor:
        losses = []
        for modality, own in batch.by_modality():
            inputs = own.inputs[modality]
            # as one batch: what has been embedded before is not embedded again
            u, v = torch.chunk(model.represent(modality, torch.cat([inputs, inputs])), 2)
            losses.append(self._weighed(alignment(u, v, own.matches), uniformity(u, v, own.matches)))
        return torch.stack(losses or [batch.no_loss]).mean()

    def evaluate(
        self, model: Embedder, head: nn.Module | None, samples: Samples, *, batch_size: int
    ) -> dict[str, float]:
        """The two terms of every modality that the samples have, without noise, and ``agreement``."""
        metrics, total = dict[str, float](), list[float]()
        index = torch.arange(min(len(samples), _MOST))
        with evaluating(model):
            for modality in samples.modalities:
                own = samples.subset(index).having(modality)
                if not len(own):
                    continue
                groups = own.matches.to(model.device)
                parts = [
                    own.batch(part, modalities=[modality]) for part in torch.split(torch.arange(len(own)), batch_size)
                ]
                rows = torch.cat([model.represent(modality, x.inputs[modality].to(model.device)) for x in parts])
                near, spread = alignment(rows, rows, groups), uniformity(rows, rows, groups)
                metrics |= {f"{modality}_alignment": float(near), f"{modality}_uniformity": float(spread)}
                total.append(-float(self._weighed(near, spread)))
        return {self.primary: sum(total) / len(total)} | metrics | {"n": float(len(index))}

    def _weighed(self, near: Tensor, spread: Tensor) -> Tensor:
        return near + self.uniformity * spread
