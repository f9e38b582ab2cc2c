from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed import Experiment, run
from polyfed.lab.analysis.landscape import grid_axis, loss_surface, run_landscape
from polyfed.runs.opened import open_run


def test_a_quadratic_bowl_has_the_values_of_its_formula() -> None:
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    losses = [lambda: (x**2).sum() + 3 * (y**2).sum(), lambda: (x**2).sum() + 5 * (y**2).sum()]
    directions = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    found = loss_surface(losses, [x, y], directions, grid=5, extent=2.0)
    a = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(found, a[:, None] ** 2 + 4 * a**2)


def network() -> tuple[nn.Module, list[Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
    return net, list(net.parameters())


def test_weights_are_as_before_bit_for_bit_even_when_the_loss_fails() -> None:
    net, parameters = network()
    with torch.no_grad():
        parameters[0][0, 0] = 1e-30
    before = [parameter.detach().clone() for parameter in parameters]
    expected = net(torch.ones(1, 3)).square().sum().item()
    values = loss_surface([lambda: net(torch.ones(1, 3)).square().sum()], parameters, torch.randn(2, 8), grid=3)
    assert float(values[1, 1]) == expected

    def failing() -> Tensor:
        if not torch.equal(parameters[0], before[0]):
            raise ValueError("no further")
        return net(torch.ones(1, 3)).sum()

    with pytest.raises(ValueError, match="no further"):
        loss_surface([failing], parameters, torch.ones(2, 8), grid=3)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(before, parameters, strict=True))


def test_the_middle_of_the_axis_is_zero() -> None:
    assert grid_axis(5, 0.3).tolist() == pytest.approx([-0.3, -0.15, 0.0, 0.15, 0.3])
    assert float(grid_axis(21, 0.7)[10]) == 0.0


# ---- of runs


def test_the_landscape_of_a_run_is_of_its_public_set(tiny_run: Path) -> None:
    opened = open_run(tiny_run).server_model("last")
    before = {name: value.clone() for name, value in opened.model.state_dict().items()}
    found = run_landscape(opened, samples=20, grid=3, extent=0.5, steps=6)
    assert tuple(found.figures[name] for name in ("data", "samples", "batch")) == ("public set (scenes, train)", 20, 16)
    assert [len(row) for row in found.figures["losses"]] == [3, 3, 3]
    assert all(torch.equal(before[name], value) for name, value in opened.model.state_dict().items())
    again = run_landscape(open_run(tiny_run).server_model("last"), samples=20, grid=3, extent=0.5, steps=6)
    assert again.figures == found.figures
    facts = found.figures
    assert facts["loss"] == facts["losses"][1][1]
    assert facts["greatest_loss"] >= facts["loss"]


def test_curvature_along_an_eigenvector_is_its_eigenvalue(classifier_run: Path) -> None:
    found = run_landscape(open_run(classifier_run).server_model("last"), samples=8, grid=3, extent=0.01, steps=60)
    assert found.figures["data"] == "private, test"  # without a public set
    low, middle, high = (row[1] for row in found.figures["losses"])
    assert (high - 2 * middle + low) / 0.01**2 == pytest.approx(found.figures["eigenvalues"][0], rel=0.1)


def test_a_last_batch_of_one_is_left_out(tiny_run: Path) -> None:
    assert run_landscape(open_run(tiny_run).server_model("last"), samples=17, grid=3, steps=6).figures["samples"] == 16


def test_a_task_without_its_labels_in_the_public_set_uses_the_test_split(tiny: dict[str, Any], tmp_path: Path) -> None:
    image = tiny["clients"]["image"]
    tiny["data"]["sources"]["scenes"]["targets"] = {}
    tiny["server"] = {key: image[key] for key in ("model", "task", "source", "training")}
    tiny["clients"], tiny["run"]["rounds"] = {"image": image}, 1
    folder = run(Experiment.load(tiny), tmp_path / "run").folder
    assert (
        run_landscape(open_run(folder).server_model("last"), samples=8, grid=3, steps=6).figures["data"]
        == "private, test"
    )
