"""What of an experiment can be tuned, and what it is with other numbers."""

from __future__ import annotations

import pytest

from polyfed.core.errors import ConfigError
from polyfed.runs.experiment import Experiment
from polyfed.runs.tuning import Ladders, Tunable
from small_federations import three_kinds

LADDERS: Ladders = {
    "clients' rate": (["clients.*.training.optimizer.lr"], ()),
    "server's rate": (["server.training.optimizer.lr", "algorithm.distiller.training.optimizer.lr"], ()),
    "passes": (["algorithm.task.epochs", "algorithm.distiller.epochs", "algorithm.server_epochs"], (1, 2, 4)),
    "weight": (["algorithm.distiller.weight"], ()),
}


def paths(*overrides: str, method: str = "creamfl") -> dict[str, list[str]]:
    tunable = Tunable.of(Experiment.load(three_kinds(name=method), overrides), LADDERS)
    return {name: list(kind.values) for name, kind in tunable.kinds.items()}


def test_a_method_has_the_kinds_of_which_it_has_a_number_that_may_be_another() -> None:
    rates = [f"clients.{group}.training.optimizer.lr" for group in ("image", "text", "paired")]
    own = paths()
    assert own == {
        "clients' rate": rates,
        "server's rate": ["server.training.optimizer.lr"],
        "passes": ["algorithm.task.epochs", "algorithm.distiller.epochs"],
        "weight": ["algorithm.distiller.weight"],
    }
    # passes of a joint task are the distiller's; a weight of 0 stays 0
    assert paths("algorithm.task.order=joint")["passes"] == ["algorithm.distiller.epochs"]
    assert "weight" not in paths("algorithm.distiller.weight=0")
    assert paths("twin.kind=server-only") == {
        "server's rate": own["server's rate"],
        "passes": ["algorithm.server_epochs"],
    }
    assert paths(method="fedavg") == {"clients' rate": rates}  # whose server averages


def test_what_is_fixed_is_not_there() -> None:
    own = Experiment.load(three_kinds(name="creamfl"))
    tunable = Tunable.of(own, LADDERS, lambda path: "clients.text" in path or path.endswith("weight"))
    assert list(tunable.kinds["clients' rate"].values) == [
        "clients.image.training.optimizer.lr",
        "clients.paired.training.optimizer.lr",
    ]
    assert "weight" not in tunable.kinds


def test_a_choice_multiplies_what_there_is_and_nothing_else() -> None:
    own = Experiment.load(three_kinds(name="creamfl"))
    tunable = Tunable.of(own, LADDERS)
    made = tunable.at({"clients' rate": 0.5, "passes": 4.0, "unknown": 2.0})
    assert {name: group.training.optimizer.lr for name, group in made.clients.items()} == {
        name: group.training.optimizer.lr / 2 for name, group in own.clients.items()
    }
    assert made.algorithm.server_passes == 4 * (own.algorithm.server_passes or 0)
    assert tunable.at({}) == own
    assert tunable.accepts({"server's rate": 2.0})
    assert not tunable.accepts({"server's rate": 2.0**20})
    with pytest.raises(ConfigError, match=r"server\.training\.optimizer\.lr"):
        tunable.at({"server's rate": 2.0**20})
