"""Loss landscape around a server model, along the top eigenvectors of the Hessian (FedCola, appendix B.7).

Eigenvectors come from Hessian-vector products alone; the matrix is never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from papers.drawing import Matrix, draw_panels
from pydantic import Field
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator, isolated
from polyfed.data.samples import Batch, Samples
from polyfed.federation.data import sample_views
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult, ModelName, server_model
from polyfed.reporting.tables import TextTable
from polyfed.runs.opened import Run, ServerModel

Loss = Callable[[], Tensor]
"""Scalar loss of a fixed batch at the current values of the parameters."""

_SHORT = 10  # vectors of the first Krylov space; often enough, as the top eigenvalues of a network stand out
_REMEDY = "this loss cannot be differentiated twice: analyse a run with another task or encoder"


class Landscape(Analysis):
    """Draw the server's loss around its final weights, along the top two eigenvectors of the Hessian.

    Of samples of the public set, or of the test split if there is none. The model is in evaluation mode (no dropout,
    fixed batch statistics) and sees the evaluation view, so that the loss is a function of the weights alone. Only
    trainable weights are moved.
    """

    samples: int = Field(default=256, ge=2, description="samples that the loss is of")
    grid: int = Field(default=21, description="points along each direction, odd")
    extent: float = Field(default=0.5, description="farthest move, in units of the weights' L2 norm")
    steps: int = Field(default=40, description="Hessian-vector products at most")
    model: ModelName = "last"

    def answer(self, run: Run) -> AnalysisResult:
        server = server_model(run, self.model)
        cfg, model = server.run.experiment, server.model
        assert cfg.server is not None  # a saved model requires it
        axis = grid_axis(self.grid, self.extent)
        size = cfg.server.training.batch_size
        with cpu_threads(cfg.run.threads):
            data, batches = _shuffled_batches(server, self.samples, size)
            losses: list[Loss] = [partial(server.task.loss, model, server.head, batch) for batch in batches]
            parameters = list(model.trained().values())
            pairs = top_eigenvectors(losses, parameters, 2, steps=self.steps, generator=generator("landscape"))
            values = loss_surface(losses, parameters, pairs.vectors, grid=self.grid, extent=self.extent)
        norm, number = float(flat(parameters).norm()), sum(map(len, batches))
        centre = float(values[self.grid // 2, self.grid // 2])
        facts = {
            "run": server.run.name,
            "round": server.round,
            "data": data,
            "samples": number,
            "batch": size,
            "extent": self.extent,
            "norm": norm,
            "eigenvalues": pairs.values.tolist(),
            "residuals": pairs.residuals.tolist(),
            "hessian_products": pairs.steps,
            "parameters": pairs.vectors.shape[1],
            "grid": self.grid,
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


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenpairs of largest magnitude.

    Attributes:
        values: [k], descending in magnitude.
        vectors: [k, n], unit norm; the entry of largest magnitude is positive.
        residuals: [k], ||H v - lambda v||; an eigenvalue lies within that distance of ``values``.
        steps: Hessian-vector products that it took.
    """

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n"]
    residuals: Float[Tensor, " k"]
    steps: int


def flat(parts: Sequence[Tensor]) -> Float[Tensor, " n"]:
    return torch.cat([part.detach().reshape(-1) for part in parts])


def like(vector: Float[Tensor, " n"], parameters: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of ``flat``: pieces of the vector in the shapes of the parameters."""
    pieces = torch.split(vector, [parameter.numel() for parameter in parameters])
    return [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]


def hessian_product(
    losses: Sequence[Loss], parameters: Sequence[Tensor], vector: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """H v for the Hessian of the mean of ``losses``, by differentiating grad(L) . v (Pearlmutter 1994).

    The graph of one batch is held at a time.

    Raises:
        ConfigError: the loss cannot be differentiated twice.
    """
    parts, total = like(vector, parameters), torch.zeros_like(vector)
    # the fused kernels of attention and of cuDNN's recurrent networks have no second derivative
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False), torch.enable_grad():
        for loss in losses:
            total += flat(_second_derivative(loss, parameters, parts)) / len(losses)
    return total


def top_eigenvectors(
    losses: Sequence[Loss],
    parameters: Sequence[Tensor],
    k: int = 2,
    *,
    steps: int = 40,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    """Eigenpairs of largest magnitude of the Hessian of the mean of ``losses`` over ``parameters``, by ARPACK.

    Two Krylov spaces at most: a short one, then one that begins with what the first found and takes the steps that are
    left. Holds as many vectors of the size of the parameters as the larger has.

    Args:
        losses: one for each fixed batch.
        parameters: leaves that require gradients, of one dtype, on one device; not changed.
        k: number of pairs.
        steps: Hessian-vector products at most.
        tolerance: stop when every residual is below this share of the largest eigenvalue.
        generator: Generator of the start vector, on the CPU; by default seeded with 0.

    Raises:
        ConfigError: k or steps do not suit the number of parameters, or the loss cannot be differentiated twice.
    """
    size = sum(parameter.numel() for parameter in parameters)
    if not 1 <= k <= min(steps // 2 - 1, size - 1):
        raise ConfigError(
            f"{k} eigenvectors of {size} parameters in {steps} steps: it takes at least {2 * k + 2} steps, and more "
            "parameters than eigenvectors, of which there must be one"
        )
    start = torch.randn(size, generator=generator or torch.Generator().manual_seed(0)).to(parameters[0])

    def product(vector: Tensor) -> Tensor:
        return hessian_product(losses, parameters, vector)

    beside = k + 1  # products that a space takes beyond its vectors: ARPACK's start, and the residuals
    pairs = _krylov(product, start, k, min(max(_SHORT, k + 1), size, steps - beside))
    left = min(steps - pairs.steps - beside, size)
    if left > k and bool((pairs.residuals > tolerance * pairs.values.abs().max()).any()):
        better = _krylov(product, pairs.vectors.sum(0), k, left)
        pairs = replace(better, steps=pairs.steps + better.steps)
    return pairs


def _krylov(product: Callable[[Tensor], Tensor], start: Float[Tensor, " n"], k: int, space: int) -> Eigenpairs:
    """The best pairs of the Krylov space of ``start`` with so many vectors."""
    import numpy as np
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    steps = 0

    def by_numpy(vector: Any) -> Any:
        nonlocal steps
        steps += 1
        return product(torch.from_numpy(vector.reshape(-1)).to(start)).cpu().numpy()

    operator = LinearOperator((len(start), len(start)), matvec=by_numpy, dtype=start.cpu().numpy().dtype)
    try:
        # a tolerance of 1 takes what one space holds; by default ARPACK gives nothing where that is not enough
        values, columns = eigsh(operator, k, v0=start.cpu().numpy(), ncv=space, maxiter=1, tol=1.0)
    except ArpackError:  # no curvature along the start, hence no space; the residuals show any elsewhere
        values, columns = np.zeros(k), np.eye(len(start), k, dtype=operator.dtype)
    order = np.argsort(-abs(values))
    values, vectors = values[order], np.ascontiguousarray(columns[:, order].T)
    residuals = [np.linalg.norm(by_numpy(v) - value * v) for value, v in zip(values, vectors, strict=True)]
    signs = np.sign(np.take_along_axis(vectors, abs(vectors).argmax(1)[:, None], axis=1))
    return Eigenpairs(
        torch.from_numpy(values).double(),
        torch.from_numpy(vectors * signs).to(start),
        torch.tensor(residuals, dtype=torch.float64),
        steps,
    )


def _second_derivative(loss: Loss, parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> Sequence[Tensor]:
    def gradients(value: Tensor, *, create_graph: bool = False) -> Sequence[Tensor]:
        return torch.autograd.grad(
            value, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )

    first = gradients(loss(), create_graph=True)
    slope = torch.stack([(a * b).sum() for a, b in zip(first, parts, strict=True)]).sum()
    if not slope.requires_grad:  # the loss is linear
        return [torch.zeros_like(parameter) for parameter in parameters]
    if _ends_early(slope):
        raise ConfigError(f"{_REMEDY} (an operation of it is marked once_differentiable)")
    try:
        return gradients(slope)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if "derivative for" not in text:
            raise
        raise ConfigError(f"{_REMEDY} ({text})") from error


def _ends_early(value: Tensor) -> bool:
    """Whether the graph has an operation without second derivative: torch would count it as constant, silently."""
    nodes, seen = [value.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name().rpartition("::")[2] == "Error":
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


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
    """Description of the samples, and the samples; a last batch of one, without a contrast, is left out."""
    cfg, federation = server.run.experiment, server.run.federation
    assert cfg.server is not None
    public = federation.public_samples(sample_views(server.settings, server.task))
    if cfg.public is not None and public is not None and _has_targets(server, public):
        data, samples = f"public set ({cfg.public.source}, {cfg.public.split})", public
    else:
        data = f"{cfg.server.source}, {cfg.server.test_split}"
        samples = federation.server_samples(cfg.server.test_split)
    # siblings (captions of one image) in one batch would be each other's negatives
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
