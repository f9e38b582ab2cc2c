"""Loss landscape of a run's server model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from polyfed.analysis.hessian import Loss, flat, top_eigenvectors
from polyfed.analysis.lanczos import Eigenpairs
from polyfed.analysis.landscape import axis_of, landscape
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator, isolated
from polyfed.data.samples import Batch, Samples
from polyfed.runs.opened import ServerModel


@dataclass(frozen=True)
class Landscape:
    """The loss around a run's server model.

    Attributes:
        run, round: whose model, and after which round it was saved.
        data: what the loss is of.
        samples, batch: number of samples, and of samples a batch; the loss is the mean over batches.
        extent: farthest move along a direction, in units of the weights' L2 norm.
        norm: L2 norm of the weights that are moved.
        pairs: top eigenpairs of the Hessian.
        values: loss [grid, grid]; the middle is the model itself.
    """

    run: str
    round: int
    data: str
    samples: int
    batch: int
    extent: float
    norm: float
    pairs: Eigenpairs
    values: Float[Tensor, "grid grid"]

    @property
    def axis(self) -> Float[Tensor, " grid"]:
        """Coordinates of rows and columns of ``values``."""
        return axis_of(len(self.values), self.extent)

    @property
    def centre(self) -> float:
        """Loss of the model itself."""
        return float(self.values[len(self.values) // 2, len(self.values) // 2])

    def to_json(self) -> dict[str, Any]:
        """All but vectors and grid."""
        plain = {name: getattr(self, name) for name in ("run", "round", "data", "samples", "batch", "extent", "norm")}
        return plain | {
            "eigenvalues": self.pairs.values.tolist(),
            "residuals": self.pairs.residuals.tolist(),
            "hessian_products": self.pairs.steps,
            "parameters": self.pairs.vectors.shape[1],
            "grid": len(self.values),
            "loss": self.centre,
            "greatest_loss": float(self.values.max()),
            "mean_rise": float(self.values.mean()) - self.centre,
        }


def run_landscape(
    server: ServerModel, *, samples: int = 256, grid: int = 21, extent: float = 0.5, steps: int = 40
) -> Landscape:
    """The landscape of the server's task loss on samples of the public set, or of the test split if there is none.

    The model is in evaluation mode (no dropout, fixed batch statistics) and sees the evaluation view, so the loss
    is a function of the weights alone. Only trainable weights are moved.

    Args:
        server: the model.
        samples: number of samples, drawn at random; they come in batches of the server's training batch size.
        grid: points along each direction, odd.
        extent: farthest move, in units of the weights' L2 norm.
        steps: Hessian-vector products at most.

    Raises:
        ConfigError: an option is out of range, or the loss cannot be differentiated twice.
    """
    axis_of(grid, extent)
    if samples < 2:
        raise ConfigError(f"samples {samples}: the loss needs at least 2, such as 256")
    with cpu_threads(server.run.experiment.run.threads):
        data, batches = _chosen(server, samples)
        losses = _losses(server, batches)
        parameters = [parameter for parameter in server.model.parameters() if parameter.requires_grad]
        pairs = top_eigenvectors(losses, parameters, 2, steps=steps, generator=generator("landscape"))
        values = landscape(losses, parameters, pairs.vectors, grid=grid, extent=extent)
    return Landscape(
        run=server.run.name,
        round=server.round,
        data=data,
        samples=sum(map(len, batches)),
        batch=_batch_size(server),
        extent=extent,
        norm=float(flat(parameters).norm()),
        pairs=pairs,
        values=values,
    )


def _batch_size(server: ServerModel) -> int:
    assert server.run.experiment.server is not None  # there is no saved model without
    return server.run.experiment.server.training.batch_size


def _chosen(server: ServerModel, most: int) -> tuple[str, list[Batch]]:
    """What the samples are, and the samples in shuffled batches; a last batch of one, without a contrast, is left out.

    Shuffled, since siblings (captions of one picture) in a batch would be each other's negatives.
    """
    name, samples = _samples(server)
    order = torch.randperm(len(samples), generator=generator(server.run.experiment.run.seed, "landscape"))
    batches = samples.subset(order[:most]).batches(_batch_size(server))
    return name, [batch.to(server.model.device) for batch in batches if len(batch) > 1]


def _samples(server: ServerModel) -> tuple[str, Samples]:
    cfg = server.run.experiment
    assert cfg.server is not None
    federation = server.run.federation
    public = federation.public_samples(server.views)
    if cfg.public is not None and public is not None and _suits(server, public):
        return f"public set ({cfg.public.source}, {cfg.public.split})", public
    return f"{cfg.server.source}, {cfg.server.test_split}", federation.server_samples(cfg.server.test_split)


def _suits(server: ServerModel, samples: Samples) -> bool:
    """Whether the server's task has what it needs in the samples."""
    try:
        with isolated("landscape"):
            server.saved.task.head(server.saved.settings.dim, samples)
    except ConfigError:
        return False
    return True


def _losses(server: ServerModel, batches: Sequence[Batch]) -> list[Loss]:
    head = dict(server.model.heads.items()).get(server.head_name)
    return [partial(server.saved.task.loss, server.model, head, batch) for batch in batches]
