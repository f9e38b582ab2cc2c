from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from papers.creamfl import drift
from torch import Tensor
from torch.nn import functional as F

from changed_runs import with_settings
from polyfed import Experiment, run
from polyfed.core.errors import ConfigError, DataError
from polyfed.runs.opened import open_run


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=1)


def participant(name: str, group: str | None, values: Tensor) -> drift.Represented:
    return drift.Represented(name, group, 3, {"sound": values})


def test_distances_by_hand_and_by_loop() -> None:
    a, b = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[-1.0, 0.0], [0.0, 1.0]])
    assert drift.mean_distances([a, b]).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    sets = [unit(9, 4, seed=k) for k in range(3)]
    result = drift.mean_distances(sets)
    for i in range(3):
        for j in range(3):
            gaps = [math.dist(p.tolist(), q.tolist()) for p, q in zip(sets[i], sets[j], strict=True)]
            assert float(result[i, j]) == pytest.approx(sum(gaps) / 9)
    order = torch.tensor([8, 0, 3, 1, 2, 7, 6, 5, 4])
    torch.testing.assert_close(drift.mean_distances([each[order] for each in sets]), result)


def test_means_over_pairs() -> None:
    same, other = unit(20, 5), unit(20, 5, seed=1)
    shown = {"a-0": ("a", same), "a-1": ("a", same), "b": ("b", -same), "server": (None, other)}
    result = drift.modality_drift("sound", [participant(name, *own) for name, own in shown.items()])
    assert (result.clients, result.server) == ((0, 1, 2), 3)
    to_server = float(result.distances[:3, 3].mean())
    between = {"same": (1, 0), "different": (2, 2), "all": (3, 4 / 3), "server": (3, to_server)}
    for kind, (pairs, distance) in between.items():
        assert (result.between(kind).pairs, result.between(kind).distance) == (pairs, pytest.approx(distance))
    # opposite, and yet aligned
    assert result.between("same").cka == pytest.approx(1) == result.between("different").cka
    assert result.of_client(2).distance == pytest.approx(2)
    assert result.points.shape == (4, 20, 2)
    torch.testing.assert_close(result.points[0], result.points[1])


def test_one_client_and_the_server_or_no_server() -> None:
    one, other = unit(9, 3), unit(9, 3, seed=1)
    result = drift.modality_drift("sound", [participant("a", "a", one), participant("server", None, other)])
    assert (result.between("all").pairs, result.between("server").pairs) == (0, 1)
    assert math.isnan(result.between("all").distance)
    alone = drift.modality_drift("sound", [participant("a", "a", one), participant("b", "b", other)])
    assert alone.server is None
    assert math.isnan(alone.between("server").cka)


def test_widths_may_differ() -> None:
    sets = [unit(12, 3), unit(12, 5, seed=1), unit(12, 3, seed=2)]
    result = drift.modality_drift("sound", [participant(str(k), "a", values) for k, values in enumerate(sets)])
    assert result.distances[1].isnan().tolist() == [True, False, True]
    assert result.alignment.isfinite().all()
    assert result.mapped == (0, 2)
    assert result.points.shape == (2, 12, 2)
    assert result.between("all").distance == pytest.approx(float(result.distances[0, 2]))


def test_drift_of_a_run(fedafd_run: Path) -> None:
    opened = open_run(fedafd_run)
    number, (image, text) = drift.drifts_of(opened, "last", 10, "pca")
    assert number == 10
    assert image.names == ("paired-0", "paired-1", "image", "server")
    assert text.names == ("paired-0", "paired-1", "server")
    assert image.groups == ("paired", "paired", "image", None)
    assert image.rounds == (1, 1, 1, 1)
    # another way to the same figure: both models on the whole public set, one image per item
    server = open_run(fedafd_run).server_model("last")
    every = drift.drifts_of(opened, "last", 250, "pca")[1][0]
    public = opened.federation.public_samples({name: each.view for name, each in server.settings.encoders.items()})
    pictures = public.inputs["image"](torch.unique(public.rows["image"]))
    gaps = opened.client_model("image").represent("image", pictures) - server.model.represent("image", pictures)
    assert float(every.distances[2, 3]) == pytest.approx(float(gaps.detach().norm(dim=1).mean()), rel=1e-5)
    assert len(pictures) == every.points.shape[1] == 16


def test_it_is_the_same_each_time_and_is_drawn(fedafd_run: Path) -> None:
    opened = open_run(fedafd_run)
    result, again = (drift.Drift(samples=6, method="pca").answer(opened) for _ in range(2))
    assert str(result.figures) == str(again.figures)
    (left, right, *_) = result.draw().axes
    assert [len(dots.get_offsets()) for dots in left.collections] == [6] * 4
    assert right.images[0].get_array().shape == (4, 4)
    assert [row[0] for row in result.tables[0].rows][:4] == ["paired-0", "paired-1", "image", "mean, all pairs (3)"]


def test_clients_that_had_their_turn_without_a_server_model(tiny: dict[str, Any], tmp_path: Path) -> None:
    tiny["algorithm"] = {"name": "local", "local_epochs": 1}
    tiny["run"] |= {"sampling": {"cohort": 2}, "rounds": 1, "evaluate_clients": False}
    opened = open_run(run(Experiment.load(tiny), tmp_path / "run").folder)
    assert len(opened.clients) == 2
    alone = with_settings(opened, server=None)
    result, beside = (drift.drifts_of(each, "last", 250, "pca")[1][0] for each in (alone, opened))
    assert (result.names, result.server) == (tuple(opened.clients), None)
    assert beside.names == (*result.names, "server")
    assert result.between("all") == beside.between("all")


def test_what_cannot_be(fedafd_run: Path) -> None:
    opened = open_run(fedafd_run)
    with pytest.raises(ConfigError, match="3 public samples are too few to compare; it takes 4"):
        drift.drifts_of(opened, "last", 3, "pca")
    private = with_settings(opened, public=None)
    with pytest.raises(ConfigError, match="has no public set, and so no common samples"):
        drift.Drift().answer(private)


def test_representations_are_in_the_order_that_is_asked_for(fedafd_run: Path) -> None:
    opened = open_run(fedafd_run)
    member = opened.federation.members["paired-1"]
    public = opened.federation.public_samples({name: each.view for name, each in member.model.encoders.items()})
    model, index = opened.client_model("paired-1"), torch.tensor([7, 3, 12])
    values = drift.public_representations(model, "text", public, index, 2, "client")
    torch.testing.assert_close(values, model.represent("text", public.batch(torch.arange(20)).inputs["text"])[index])
    model.encoders["text"].register_forward_hook(lambda *_: torch.full((1, 8), torch.nan))
    with pytest.raises(DataError, match="representations of 'text' by client hold NaN or infinity"):
        drift.public_representations(model, "text", public, index, 9, "client")


def test_one_sample_of_each_item() -> None:
    assert drift.one_of_each_item(torch.tensor([5, 5, 2, 9, 2, 5, 9])).tolist() == [0, 2, 3]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_hsic(x: Tensor, y: Tensor) -> float:
    """The unbiased estimate as it is defined (Song et al. 2012, Eq. 5), entry by entry."""
    n = len(x)
    K = [[0.0 if i == j else float(x[i] @ x[j]) for j in range(n)] for i in range(n)]
    L = [[0.0 if i == j else float(y[i] @ y[j]) for j in range(n)] for i in range(n)]
    trace = sum(K[i][j] * L[j][i] for i in range(n) for j in range(n))
    sums = sum(map(sum, K)) * sum(map(sum, L))
    chain = sum(K[i][j] * L[j][k] for i in range(n) for j in range(n) for k in range(n))
    return (trace + sums / ((n - 1) * (n - 2)) - 2 * chain / (n - 2)) / (n * (n - 3))


@pytest.mark.parametrize("n", [4, 9])
def test_it_is_as_defined(n: int) -> None:
    x, y = drawn(n, 3) + 2, drawn(n, 5, seed=1)
    y[:, 0] += x[:, 0]
    expected = naive_hsic(x, y) / (naive_hsic(x, x) * naive_hsic(y, y)) ** 0.5
    result = drift.linear_cka([x, y])
    torch.testing.assert_close(result, torch.tensor([[1, expected], [expected, 1]], dtype=torch.float64))


def test_more_samples_than_a_block_of_rows() -> None:
    x, y = drawn(150, 4), drawn(150, 4, seed=1) + drawn(150, 4)
    p, q = (each - each.mean(0) for each in (x, y))
    biased = (p.T @ q).square().sum() / ((p.T @ p).norm() * (q.T @ q).norm())
    assert float(drift.linear_cka([x, y])[0, 1]) == pytest.approx(float(biased), abs=0.03)


def test_a_turn_a_shift_and_a_scale_change_nothing() -> None:
    x = drawn(30, 6)
    turn = torch.linalg.qr(drawn(6, 6, seed=2))[0]
    other = drawn(30, 4, seed=3) + x[:, :4]
    result = drift.linear_cka([x, 7 * x @ turn + 100, other])
    assert float(result[0, 1]) == pytest.approx(1)
    assert float(result[0, 2]) == pytest.approx(float(result[1, 2]))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(drift.linear_cka([x[order], 7 * x[order] @ turn + 100, other[order]]), result)
    torch.testing.assert_close(drift.linear_cka([x.float(), other.float()])[0, 1], result[0, 2], atol=1e-6, rtol=0)


def test_vectors_that_are_all_equal_have_none() -> None:
    result = drift.linear_cka([drawn(10, 3), torch.full((10, 3), 0.1), drawn(10, 2, seed=1)])
    assert result.isnan().tolist() == [[False, True, False], [True] * 3, [False, True, False]]


def test_sets_that_cannot_be_aligned() -> None:
    for sets in ([], [drawn(3, 2)], [drawn(5, 2), drawn(6, 2)], [torch.tensor([[1.0], [2.0], [3.0], [torch.nan]])]):
        with pytest.raises(DataError, match="it needs one finite vector for each of at least 4 samples"):
            drift.linear_cka(sets)
