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
from polyfed.analysis.opened import OpenedRun
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator, isolated
from polyfed.data.samples import Batch, Samples
from polyfed.federation.population import Population


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
    opened: OpenedRun, *, samples: int = 256, grid: int = 21, extent: float = 0.5, steps: int = 40
) -> Landscape:
    """The landscape of the server's task loss on samples of the public set, or of the test split if there is none.

    The model is in evaluation mode (no dropout, fixed batch statistics) and sees the evaluation view, so the loss
    is a function of the weights alone. Only trainable weights are moved.

    Args:
        opened: the run.
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
    with cpu_threads(opened.experiment.run.threads):
        data, batches = _chosen(opened, samples)
        losses = _losses(opened, batches)
        parameters = [parameter for parameter in opened.model.parameters() if parameter.requires_grad]
        pairs = top_eigenvectors(losses, parameters, 2, steps=steps, generator=generator("landscape"))
        values = landscape(losses, parameters, pairs.vectors, grid=grid, extent=extent)
    return Landscape(
        run=opened.name,
        round=opened.round,
        data=data,
        samples=sum(map(len, batches)),
        batch=_batch_size(opened),
        extent=extent,
        norm=float(flat(parameters).norm()),
        pairs=pairs,
        values=values,
    )


def _batch_size(opened: OpenedRun) -> int:
    assert opened.experiment.server is not None  # there is no saved model without
    return opened.experiment.server.training.batch_size


def _chosen(opened: OpenedRun, most: int) -> tuple[str, list[Batch]]:
    """What the samples are, and the samples in shuffled batches; a last batch of one, without a contrast, is left out.

    Shuffled, since siblings (captions of one picture) in a batch would be each other's negatives.
    """
    name, samples = _samples(opened)
    order = torch.randperm(len(samples), generator=generator(opened.experiment.run.seed, "landscape"))
    batches = samples.subset(order[:most]).batches(_batch_size(opened))
    return name, [batch.to(opened.model.device) for batch in batches if len(batch) > 1]


def _samples(opened: OpenedRun) -> tuple[str, Samples]:
    cfg = opened.experiment
    assert cfg.server is not None
    places = Population(cfg.data, cfg.public, cfg.server, {}, cfg.run.seed, opened.saved.folder / "vocabulary")
    views = {name: encoder.view for name, encoder in opened.saved.settings.encoders.items()}
    public = places.public_samples(views)
    if cfg.public is not None and public is not None and _suits(opened, public):
        return f"public set ({cfg.public.source}, {cfg.public.split})", public
    return f"{cfg.server.source}, {cfg.server.test_split}", places.server_samples(cfg.server.test_split)


def _suits(opened: OpenedRun, samples: Samples) -> bool:
    """Whether the server's task has what it needs in the samples."""
    try:
        with isolated("landscape"):
            opened.saved.task.head(opened.saved.settings.dim, samples)
    except ConfigError:
        return False
    return True


def _losses(opened: OpenedRun, batches: Sequence[Batch]) -> list[Loss]:
    head = dict(opened.model.heads.items()).get(str(opened.saved.config["head"]))
    return [partial(opened.saved.task.loss, opened.model, head, batch) for batch in batches]
