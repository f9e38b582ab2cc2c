from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.lab.analysis.hessian import Eigenpairs, flat, hessian_product, like, top_eigenvectors


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


def of_diagonal(entries: Tensor, k: int, **options) -> Eigenpairs:
    """Eigenpairs of a quadratic whose Hessian is diagonal."""
    x = torch.ones(len(entries), dtype=entries.dtype, requires_grad=True)
    return top_eigenvectors([lambda: (entries * x * x).sum() / 2], [x], k, **options)


def test_a_product_is_that_with_the_dense_hessian() -> None:
    parameters, losses = tiny_network()
    hessian = dense_hessian(parameters, losses)
    vector = torch.randn(len(hessian), generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(hessian_product(losses, parameters, vector), hessian @ vector)
    for piece, parameter in zip(like(flat(parameters), parameters), parameters, strict=True):
        assert torch.equal(piece, parameter)


def test_a_quadratic_with_a_known_spectrum() -> None:
    spectrum = torch.tensor([9.0, -7.0, 4.0, 1.0, 0.5, 0.0, -0.1, 0.2], dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(8, 8, generator=generator(), dtype=torch.float64))[0]
    matrix = basis @ torch.diag(spectrum) @ basis.T
    x, y = (torch.randn(n, dtype=torch.float64, generator=generator(2)).requires_grad_() for n in (3, 5))

    def loss() -> Tensor:
        z = torch.cat([x, y])
        return z @ matrix @ z / 2 + z.sum()

    pairs = top_eigenvectors([loss], [x, y], 3, tolerance=1e-10)
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


def test_it_stops_when_it_has_converged() -> None:
    pairs = of_diagonal(torch.tensor([100.0, 50.0, *(1 / k for k in range(1, 199))]), 2, steps=100)
    assert pairs.steps < 15
    torch.testing.assert_close(pairs.values, torch.tensor([100.0, 50.0], dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_eigenvalues(dtype: torch.dtype) -> None:
    pairs = of_diagonal(torch.tensor([5.0, 5.0, 1.0, 1.0, 0.0], dtype=dtype), 2)
    torch.testing.assert_close(pairs.values, torch.tensor([5.0, 5.0], dtype=torch.float64), rtol=1e-5, atol=0)


def test_a_linear_loss_has_no_curvature_and_unused_weights_count_as_flat() -> None:
    x, unused = torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)
    pairs = top_eigenvectors([lambda: x.sum()], [x, unused], 2)
    assert (pairs.values.tolist(), pairs.residuals.tolist()) == ([0.0, 0.0], [0.0, 0.0])
    pairs = top_eigenvectors([lambda: (3 * x * x).sum()], [x, unused], 1)
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
        assert float(top_eigenvectors([loss], list(part.parameters()), 1, steps=8).values[0]) > 0


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
        top_eigenvectors([lambda: _Once.apply(x).square().sum()], [x], 1)


@pytest.mark.parametrize(("k", "steps"), [(0, 5), (2, 5), (3, 40)])
def test_numbers_that_do_not_suit(k: int, steps: int) -> None:
    with pytest.raises(ConfigError, match=f"{k} eigenvectors of 3 parameters in {steps} steps"):
        of_diagonal(torch.ones(3), k, steps=steps)
