"""Loss landscape around a server model, along the top eigenvectors of the Hessian (FedCola, appendix B.7)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator, isolated
from polyfed.data.samples import Batch, Samples
from polyfed.federation.data import sample_views
from polyfed.lab.analysis.drawing import Matrix, draw_panels
from polyfed.lab.analysis.hessian import Loss, flat, like, top_eigenvectors
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.reporting.tables import TextTable
from polyfed.runs.opened import ServerModel


def loss_surface(
    losses: Sequence[Loss],
    parameters: Sequence[Tensor],
    directions: Float[Tensor, "2 n"],
    *,
    grid: int = 21,
    extent: float = 0.5,
) -> Float[Tensor, "grid grid"]:
    """Mean of ``losses`` at theta + a v_1 + b v_2; entry [i, j] is at a = axis[i], b = axis[j].

    The parameters are moved in place, and have their former values afterwards, bit for bit, whatever happens.

    Args:
        losses: one for each fixed batch.
        parameters: leaves that the losses depend on.
        directions: v_1 and v_2 over all parameters, flattened in their order.
        grid: points along each direction; odd, so that the middle is theta itself.
        extent: a and b go from -extent to extent (``grid_axis``).

    Raises:
        ConfigError: grid or extent make no grid around theta.
    """
    axis = grid_axis(grid, extent)
    home = flat(parameters)

    def put(values: Tensor) -> None:
        for parameter, piece in zip(parameters, like(values, parameters), strict=True):
            parameter.copy_(piece)

    values = torch.empty(grid, grid, dtype=torch.float64)
    with torch.no_grad():
        try:
            for i, a in enumerate(axis.tolist()):
                for j, b in enumerate(axis.tolist()):
                    # the middle is the model itself, without a rounding
                    put(home + a * directions[0] + b * directions[1] if a or b else home)
                    values[i, j] = sum(float(loss()) for loss in losses) / len(losses)
        finally:
            put(home)
    return values


def grid_axis(grid: int, extent: float) -> Float[Tensor, " grid"]:
    """Coordinates along one direction, in units of the weights' L2 norm; the middle one is exactly 0.

    Raises:
        ConfigError: grid is not an odd number from 3 on, or extent is not positive.
    """
    if grid < 3 or grid % 2 == 0:
        raise ConfigError(f"grid {grid} has no middle with points around it; give an odd number from 3 on, such as 21")
    if not 0 < extent < float("inf"):
        raise ConfigError(f"extent {extent} must be positive and finite, such as 1.0")
    half = grid // 2
    return torch.arange(-half, half + 1, dtype=torch.float64) * (extent / half)


def run_landscape(
    server: ServerModel, *, samples: int = 256, grid: int = 21, extent: float = 0.5, steps: int = 40
) -> AnalysisResult:
    """The landscape of the server's task loss on samples of the public set, or of the test split if there is none.

    The model is in evaluation mode (no dropout, fixed batch statistics) and sees the evaluation view, so the loss
    is a function of the weights alone. Only trainable weights are moved.

    Raises:
        ConfigError: an option is out of range, or the loss cannot be differentiated twice.
    """
    cfg, model = server.run.experiment, server.model
    assert cfg.server is not None  # there is no saved model without
    axis = grid_axis(grid, extent)
    if samples < 2:
        raise ConfigError(f"samples {samples}: the loss needs at least 2, such as 256")
    size = cfg.server.training.batch_size
    with cpu_threads(cfg.run.threads):
        data, batches = _shuffled_batches(server, samples, size)
        losses: list[Loss] = [partial(server.task.loss, model, server.head, batch) for batch in batches]
        parameters = list(model.trained().values())
        pairs = top_eigenvectors(losses, parameters, 2, steps=steps, generator=generator("landscape"))
        values = loss_surface(losses, parameters, pairs.vectors, grid=grid, extent=extent)
    norm, number = float(flat(parameters).norm()), sum(map(len, batches))
    centre = float(values[grid // 2, grid // 2])
    facts = {
        "run": server.run.name,
        "round": server.round,
        "data": data,
        "samples": number,
        "batch": size,
        "extent": extent,
        "norm": norm,
        "eigenvalues": pairs.values.tolist(),
        "residuals": pairs.residuals.tolist(),
        "hessian_products": pairs.steps,
        "parameters": pairs.vectors.shape[1],
        "grid": grid,
        "losses": values.tolist(),
        "loss": centre,
        "greatest_loss": float(values.max()),
        "mean_rise": float(values.mean()) - centre,
    }
    title = f"{server.run.name}, round {server.round}: loss on {number} of {data}"
    first, second = (f"eigenvector {k} ({value:.3g})" for k, value in enumerate(pairs.values.tolist(), start=1))
    moves = [f"{at:.3g}" for at in axis.tolist()]
    surface = Matrix(f"loss; down: along {first}; across: along {second}", "", moves, moves, values, digits=3)
    return AnalysisResult(facts, [_table(facts)], partial(draw_panels, title, [surface], 1))


def _table(facts: dict[str, Any]) -> TextTable:
    """Eigenvalues, and how far the loss rises."""
    pairs = zip(facts["eigenvalues"], facts["residuals"], strict=True)
    rows = [(f"eigenvalue {k}", f"{value:.5g} ± {residual:.1g}") for k, (value, residual) in enumerate(pairs, start=1)]
    rows += [(name, f"{facts[name.replace(' ', '_')]:.5g}") for name in ("loss", "greatest loss", "mean rise")]
    note = (
        f"Task loss on {facts['samples']} samples of {facts['data']}; weights (L2 norm {facts['norm']:.4g}) moved by "
        f"up to {facts['extent']:g} along each eigenvector; {facts['hessian_products']} Hessian-vector products."
    )
    return TextTable(f"{facts['run']}, server model of round {facts['round']}", ("", "value"), rows, (note,))


def _shuffled_batches(server: ServerModel, most: int, size: int) -> tuple[str, list[Batch]]:
    """What the samples are, and the samples; a last batch of one, without a contrast, is left out."""
    cfg, federation = server.run.experiment, server.run.federation
    assert cfg.server is not None
    public = federation.public_samples(sample_views(server.settings, server.task))
    if cfg.public is not None and public is not None and _has_targets(server, public):
        data, samples = f"public set ({cfg.public.source}, {cfg.public.split})", public
    else:
        data = f"{cfg.server.source}, {cfg.server.test_split}"
        samples = federation.server_samples(cfg.server.test_split)
    # siblings (captions of one picture) in one batch would be each other's negatives
    order = torch.randperm(len(samples), generator=generator(cfg.run.seed, "landscape"))
    batches = samples.subset(order[:most]).batches(size)
    return data, [batch.to(server.model.device) for batch in batches if len(batch) > 1]


def _has_targets(server: ServerModel, samples: Samples) -> bool:
    try:
        with isolated("landscape"):  # a head that is built draws its weights
            server.task.head(server.settings.dim, samples)
    except ConfigError:
        return False
    return True
