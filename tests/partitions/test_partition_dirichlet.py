import numpy as np
import pytest
import torch

from polyfed.core.errors import ConfigError
from polyfed.partitions.dirichlet import Dirichlet


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table(parts: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Class x client counts."""
    return torch.stack([labels[part].bincount(minlength=int(labels.max()) + 1) for part in parts], dim=1)


def largest_shares(labels: torch.Tensor, clients: int, alpha: float) -> float:
    """Mean over classes of the largest client's share."""
    counts = table(Dirichlet(alpha=alpha, min_size=1).split(len(labels), labels, clients, gen()), labels)
    return (counts.max(dim=1).values / counts.sum(dim=1)).mean().item()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5, 10])
def test_no_client_exceeds_the_cap_by_more_than_one_share_of_a_class(alpha: float, seed: int):
    labels = torch.randint(20, (3000,), generator=gen(seed))
    parts = Dirichlet(alpha=alpha, min_size=1).split(3000, labels, 8, gen(seed))
    counts, cap = table(parts, labels), 3000 / 8
    for client in counts.T:
        # a client gets nothing more once it is at the cap: without its last class it was below
        last = int(client.nonzero().max())
        assert client.sum() - client[last] < cap
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(3000))


def test_every_client_has_the_minimum():
    labels = torch.arange(2000) % 10
    for seed in range(10):
        parts = Dirichlet(alpha=0.1, min_size=60).split(2000, labels, 10, gen(seed))
        assert min(map(len, parts)) >= 60


def test_alpha_goes_from_one_holder_a_class_to_equal_shares():
    labels = torch.arange(8000) % 40
    assert largest_shares(labels, 10, 1e-3) > 0.97
    assert largest_shares(labels, 10, 0.5) == pytest.approx(0.42, abs=0.1)
    assert largest_shares(labels, 10, 1e6) == pytest.approx(0.1, abs=0.015)


def test_shares_of_one_class_are_dirichlet_distributed():
    # with one class the cap never acts: the variance of a share is (1/K)(1 - 1/K) / (K alpha + 1)
    labels = torch.zeros(1000, dtype=torch.int64)
    draws = [Dirichlet(alpha=0.5, min_size=1).split(1000, labels, 4, gen(seed)) for seed in range(800)]
    shares = np.array([[len(part) / 1000 for part in parts] for parts in draws])
    assert shares.mean(axis=0) == pytest.approx(0.25, abs=0.03)
    # redrawing until nobody is empty takes the corners away, so the spread is a little smaller
    assert 0.8 < shares.var(axis=0).mean() / (0.25 * 0.75 / 3) <= 1.02


def test_labels_may_be_any_integers():
    labels = torch.tensor([-1, 70, 5]).repeat(40)
    plain = torch.tensor([0, 2, 1]).repeat(40)
    parts = Dirichlet().split(120, labels, 3, gen())
    same = Dirichlet().split(120, plain, 3, gen())
    assert all(torch.equal(a, b) for a, b in zip(parts, same, strict=True))


def test_one_client_gets_everything():
    (part,) = Dirichlet(min_size=1).split(7, torch.zeros(7, dtype=torch.int64), 1, gen())
    assert part.sort().values.tolist() == list(range(7))


def test_one_item():
    (part,) = Dirichlet(min_size=1).split(1, torch.tensor([3]), 1, gen())
    assert part.tolist() == [0]


def test_as_many_clients_as_items_ends_in_an_error_or_in_one_each():
    labels = torch.zeros(4, dtype=torch.int64)
    parts = Dirichlet(alpha=1e6, min_size=1).split(4, labels, 4, gen())
    assert sorted(part.item() for part in parts) == [0, 1, 2, 3]


def test_unreachable_minimum_tells_numbers_and_remedy():
    labels = torch.arange(400) % 2
    with pytest.raises(
        ConfigError, match=r"alpha=0.001, 10 clients and 2 classes .* 50 draws, min_size=10; raise alpha"
    ):
        Dirichlet(alpha=1e-3, attempts=50).split(400, labels, 10, gen())


def test_alpha_must_be_positive():
    with pytest.raises(ValueError, match="alpha"):
        Dirichlet(alpha=0)
