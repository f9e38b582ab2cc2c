from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.analysis.hessian import flat, hessian_product, like, top_eigenvectors
from polyfed.analysis.lanczos import lanczos
from polyfed.core.errors import ConfigError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symmetric(spectrum: list[float], seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix with that spectrum, and its eigenvectors as columns."""
    size = len(spectrum)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator(seed), dtype=torch.float64))[0]
    return basis @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ basis.T, basis


def power_iteration(product, size: int, k: int, steps: int = 3000) -> tuple[Tensor, Tensor]:
    """Eigenpairs of largest magnitude one by one, each orthogonal to those found (the slow way)."""
    values, vectors = [], torch.zeros(0, size, dtype=torch.float64)
    for number in range(k):
        vector = torch.randn(size, generator=generator(number), dtype=torch.float64)
        for _ in range(steps):
            vector = vector - vectors.T @ (vectors @ vector)
            vector = product(vector / vector.norm())
        vector = vector / vector.norm()
        values.append(vector @ product(vector))
        vectors = torch.cat([vectors, vector[None]])
    return torch.stack(values), vectors


def tiny_network(seed: int = 0) -> tuple[nn.Module, list[Tensor], list]:
    """A network with 31 weights and two batches."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        data = [(torch.randn(5, 3).double(), torch.randint(3, (5,))) for _ in range(2)]
    losses = [lambda x=x, y=y: F.cross_entropy(net(x), y) for x, y in data]
    return net, list(net.parameters()), losses


def dense_hessian(parameters: list[Tensor], losses: list) -> Tensor:
    loss = sum(loss() for loss in losses) / len(losses)
    slope = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, create_graph=True)])
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in slope]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


def test_a_product_is_that_with_the_dense_hessian() -> None:
    _, parameters, losses = tiny_network()
    hessian = dense_hessian(parameters, losses)
    vector = torch.randn(len(hessian), generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(hessian_product(losses, parameters, vector), hessian @ vector)


def test_pieces_are_put_back() -> None:
    _, parameters, _ = tiny_network()
    for piece, parameter in zip(like(flat(parameters), parameters), parameters, strict=True):
        assert torch.equal(piece, parameter)


def test_a_quadratic_with_a_known_spectrum() -> None:
    matrix, basis = symmetric([9.0, -7.0, 4.0, 1.0, 0.5, 0.0, -0.1, 0.2])
    x, y = (torch.randn(n, dtype=torch.float64, generator=generator(2)).requires_grad_() for n in (3, 5))

    def loss() -> Tensor:
        z = torch.cat([x, y])
        return z @ matrix @ z / 2 + z.sum()

    found = top_eigenvectors([loss], [x, y], 3, tolerance=1e-10)
    torch.testing.assert_close(found.values, torch.tensor([9.0, -7.0, 4.0], dtype=torch.float64))
    torch.testing.assert_close((found.vectors @ basis[:, :3]).abs(), torch.eye(3, dtype=torch.float64))
    assert bool((found.residuals < 1e-6).all())
    assert bool((found.vectors.gather(1, found.vectors.abs().argmax(1, keepdim=True)) > 0).all())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_network_agrees_with_its_dense_hessian_and_with_power_iteration(seed: int) -> None:
    _, parameters, losses = tiny_network(seed)
    hessian = dense_hessian(parameters, losses)
    values, vectors = torch.linalg.eigh(hessian)
    order = values.abs().argsort(descending=True)[:2]
    found = top_eigenvectors(losses, parameters, 2, tolerance=1e-8, generator=generator(seed))
    torch.testing.assert_close(found.values, values[order])
    torch.testing.assert_close((found.vectors @ vectors[:, order]).abs(), torch.eye(2, dtype=torch.float64))
    by_power, vectors = power_iteration(lambda v: hessian_product(losses, parameters, v), len(hessian), 2, steps=300)
    torch.testing.assert_close(found.values, by_power, rtol=1e-3, atol=1e-4)


def test_residuals_are_those_of_the_vectors() -> None:
    matrix, _ = symmetric([1 / k for k in range(1, 41)])
    found = lanczos(lambda v: matrix @ v, torch.ones(40, dtype=torch.float64), 2, steps=6, tolerance=0.0)
    exact = (found.vectors @ matrix - found.values[:, None] * found.vectors).norm(dim=1)
    torch.testing.assert_close(found.residuals, exact)
    assert found.steps == 6
    assert float(exact.max()) > 1e-3


def test_it_stops_when_it_has_converged() -> None:
    matrix, _ = symmetric([100.0, 50.0, *[1 / k for k in range(1, 199)]])
    found = lanczos(lambda v: matrix @ v, torch.ones(200, dtype=torch.float64), 2, steps=100)
    assert found.steps < 15
    torch.testing.assert_close(found.values, torch.tensor([100.0, 50.0], dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_eigenvalues_and_start_vectors_without_some(dtype: torch.dtype) -> None:
    matrix = torch.diag(torch.tensor([5.0, 5.0, 1.0, 1.0, 0.0], dtype=dtype))
    found = lanczos(lambda v: matrix @ v, torch.ones(5, dtype=dtype), 2, steps=40)
    torch.testing.assert_close(found.values, torch.tensor([5.0, 5.0], dtype=torch.float64), rtol=1e-5, atol=0)
    axis = torch.zeros(5, dtype=dtype)
    axis[3] = 1
    assert float(lanczos(lambda v: matrix @ v, axis, 1, steps=40).values[0]) == pytest.approx(5.0)


def test_a_linear_loss_has_no_curvature_and_unused_weights_count_as_flat() -> None:
    x, unused = torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)
    found = top_eigenvectors([lambda: x.sum()], [x, unused], 2)
    assert found.values.tolist() == [0.0, 0.0]
    found = top_eigenvectors([lambda: (3 * x * x).sum()], [x, unused], 1)
    assert found.values.tolist() == pytest.approx([6.0])


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
        found = top_eigenvectors([loss], list(part.parameters()), 1)
        assert float(found.values[0]) > 0


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


@pytest.mark.parametrize(("k", "steps"), [(0, 5), (6, 5), (4, 40)])
def test_numbers_that_do_not_suit(k: int, steps: int) -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ConfigError, match=f"{k} eigenvectors of 3 parameters in {steps} steps"):
        top_eigenvectors([lambda: x.square().sum()], [x], k, steps=steps)
