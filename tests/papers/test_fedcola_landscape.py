from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from papers.fedcola import landscape
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed import Experiment, run
from polyfed.core.errors import ConfigError
from polyfed.runs.opened import open_run


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_network(seed: int = 0) -> tuple[list[Tensor], list]:
    """A network with 31 weights and two batches."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        data = [(torch.randn(5, 3).double(), torch.randint(3, (5,))) for _ in range(2)]
    return list(net.parameters()), [lambda x=x, y=y: F.cross_entropy(net(x), y) for x, y in data]


def dense_hessian(parameters: list[Tensor], losses: list) -> Tensor:
    loss = sum(loss() for loss in losses) / len(losses)
    slope = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, create_graph=True)])
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in slope]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


def of_diagonal(entries: Tensor, k: int, **options) -> landscape.Eigenpairs:
    """Eigenpairs of a quadratic whose Hessian is diagonal."""
    x = torch.ones(len(entries), dtype=entries.dtype, requires_grad=True)
    return landscape.top_eigenvectors([lambda: (entries * x * x).sum() / 2], [x], k, **options)


def test_a_product_is_that_with_the_dense_hessian() -> None:
    parameters, losses = tiny_network()
    hessian = dense_hessian(parameters, losses)
    vector = torch.randn(len(hessian), generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(landscape.hessian_product(losses, parameters, vector), hessian @ vector)
    for piece, parameter in zip(landscape.like(landscape.flat(parameters), parameters), parameters, strict=True):
        assert torch.equal(piece, parameter)


def test_a_quadratic_with_a_known_spectrum() -> None:
    spectrum = torch.tensor([9.0, -7.0, 4.0, 1.0, 0.5, 0.0, -0.1, 0.2], dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(8, 8, generator=generator(), dtype=torch.float64))[0]
    matrix = basis @ torch.diag(spectrum) @ basis.T
    x, y = (torch.randn(n, dtype=torch.float64, generator=generator(2)).requires_grad_() for n in (3, 5))

    def loss() -> Tensor:
        z = torch.cat([x, y])
        return z @ matrix @ z / 2 + z.sum()

    pairs = landscape.top_eigenvectors([loss], [x, y], 3, tolerance=1e-10)
    torch.testing.assert_close(pairs.values, spectrum[:3])
    torch.testing.assert_close((pairs.vectors @ basis[:, :3]).abs(), torch.eye(3, dtype=torch.float64))
    assert bool((pairs.residuals < 1e-6).all())
    assert bool((pairs.vectors.gather(1, pairs.vectors.abs().argmax(1, keepdim=True)) > 0).all())


@pytest.mark.parametrize("steps", [6, 13, 20, 40])
def test_residuals_are_those_of_the_vectors_and_more_steps_leave_less(steps: int) -> None:
    entries = 1 / torch.arange(1, 401, dtype=torch.float64).sqrt()
    pairs = of_diagonal(entries, 2, steps=steps, tolerance=0.0)
    exact = (pairs.vectors * entries - pairs.values[:, None] * pairs.vectors).norm(dim=1)
    torch.testing.assert_close(pairs.residuals, exact)
    assert pairs.steps <= steps
    assert bool(((pairs.values - entries[:2]).abs() <= pairs.residuals + 1e-12).all()) or steps < 20
    assert float(exact.max()) < {6: 1, 13: 0.1, 20: 0.1, 40: 1e-3}[steps]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entries", [[100.0, 50.0, *(1 / k for k in range(1, 199))], [5.0, 5.0, 1.0, 1.0, 0.0]])
def test_it_stops_when_it_has_converged(entries: list[float], dtype: torch.dtype) -> None:
    pairs = of_diagonal(torch.tensor(entries, dtype=dtype), 2, steps=100)
    assert pairs.steps < 15
    torch.testing.assert_close(pairs.values, torch.tensor(entries[:2], dtype=torch.float64), rtol=1e-5, atol=0)


def test_a_linear_loss_has_no_curvature_and_unused_weights_count_as_flat() -> None:
    x, unused = torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)
    pairs = landscape.top_eigenvectors([lambda: x.sum()], [x, unused], 2)
    assert (pairs.values.tolist(), pairs.residuals.tolist()) == ([0.0, 0.0], [0.0, 0.0])
    pairs = landscape.top_eigenvectors([lambda: (3 * x * x).sum()], [x, unused], 1)
    assert pairs.values.tolist() == pytest.approx([6.0])


def test_attention_and_recurrence_can_be_differentiated_twice() -> None:
    attention = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).eval()
    recurrent = nn.GRU(4, 4, batch_first=True)
    data = torch.randn(3, 5, 4, generator=generator())
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[:, 4] = True
    for part, loss in (
        (attention, lambda: attention(data, src_key_padding_mask=mask).square().mean()),
        (recurrent, lambda: recurrent(data)[0].square().mean()),
    ):
        assert float(landscape.top_eigenvectors([loss], list(part.parameters()), 1, steps=8).values[0]) > 0


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * 2 * ctx.saved_tensors[0]


def test_what_cannot_be_differentiated_twice_is_named() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ConfigError, match="cannot be differentiated twice"):
        landscape.top_eigenvectors([lambda: _Once.apply(x).square().sum()], [x], 1)


@pytest.mark.parametrize(("k", "steps"), [(0, 5), (2, 5), (3, 40)])
def test_numbers_that_do_not_suit(k: int, steps: int) -> None:
    with pytest.raises(ConfigError, match=f"{k} eigenvectors of 3 parameters in {steps} steps"):
        of_diagonal(torch.ones(3), k, steps=steps)


def test_a_quadratic_bowl_has_the_values_of_its_formula() -> None:
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    losses = [lambda: (x**2).sum() + 3 * (y**2).sum(), lambda: (x**2).sum() + 5 * (y**2).sum()]
    directions = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    result = landscape.loss_surface(losses, [x, y], directions, grid=5, extent=2.0)
    a = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(result, a[:, None] ** 2 + 4 * a**2)


def test_weights_are_as_before_bit_for_bit_even_when_the_loss_fails() -> None:
    parameters, (loss, _) = tiny_network()
    with torch.no_grad():
        parameters[0][0, 0] = 1e-30
    before = [parameter.detach().clone() for parameter in parameters]
    expected = loss().item()
    assert float(landscape.loss_surface([loss], parameters, torch.randn(2, 31).double(), grid=3)[1, 1]) == expected

    def failing() -> Tensor:
        if not torch.equal(parameters[0], before[0]):
            raise ValueError("no further")
        return loss()

    with pytest.raises(ValueError, match="no further"):
        landscape.loss_surface([failing], parameters, torch.ones(2, 31).double(), grid=3)
    assert all(torch.equal(a.view(torch.int64), b.view(torch.int64)) for a, b in zip(before, parameters, strict=True))
    assert landscape.grid_axis(5, 0.3).tolist() == pytest.approx([-0.3, -0.15, 0.0, 0.15, 0.3])
    assert float(landscape.grid_axis(21, 0.7)[10]) == 0.0


# ---- of runs


def test_the_landscape_of_a_run_is_of_its_public_set(tiny_run: Path) -> None:
    opened = open_run(tiny_run)
    model = opened.server_model("last").model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = landscape.Landscape(samples=20, grid=3, extent=0.5, steps=6).answer(opened)
    assert [result.figures[name] for name in ("data", "samples", "batch")] == ["public set (scenes, train)", 20, 16]
    assert [len(row) for row in result.figures["losses"]] == [3, 3, 3]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    again = landscape.Landscape(samples=20, grid=3, extent=0.5, steps=6).answer(open_run(tiny_run))
    assert again.figures == result.figures
    assert result.figures["greatest_loss"] >= result.figures["loss"] == result.figures["losses"][1][1]
    # a last batch of one is left out
    assert landscape.Landscape(samples=17, grid=3, steps=6).answer(open_run(tiny_run)).figures["samples"] == 16


def test_curvature_along_an_eigenvector_is_its_eigenvalue(classifier_run: Path) -> None:
    result = landscape.Landscape(samples=8, grid=3, extent=0.01, steps=60).answer(open_run(classifier_run))
    assert result.figures["data"] == "private, test"  # without a public set
    low, middle, high = (row[1] for row in result.figures["losses"])
    assert (high - 2 * middle + low) / 0.01**2 == pytest.approx(result.figures["eigenvalues"][0], rel=0.1)


def test_a_task_without_its_labels_in_the_public_set_uses_the_test_split(tiny: dict[str, Any], tmp_path: Path) -> None:
    image = tiny["clients"]["image"]
    tiny["data"]["sources"]["scenes"]["targets"] = {}
    tiny["server"] = {key: image[key] for key in ("model", "task", "source", "training")}
    tiny["clients"], tiny["run"]["rounds"] = {"image": image}, 1
    folder = run(Experiment.load(tiny), tmp_path / "run").folder
    assert landscape.Landscape(samples=8, grid=3, steps=6).answer(open_run(folder)).figures["data"] == "private, test"
