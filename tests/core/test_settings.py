"""Settings and components."""

from __future__ import annotations

from typing import ClassVar

import pytest
from pydantic import SerializeAsAny, ValidationError

from polyfed.algorithms.algorithm import Algorithm
from polyfed.algorithms.fedavg import FedAvg
from polyfed.core.settings import Settings
from polyfed.partitions.partition import Dirichlet, Partition


class Holder(Settings):
    partition: SerializeAsAny[Partition]
    algorithm: SerializeAsAny[Algorithm] = FedAvg()


class Foreign(FedAvg):
    home_town: ClassVar[str] = "elsewhere"
    extra: int = 3


def test_a_component_is_chosen_by_name() -> None:
    held = Holder.model_validate({"partition": {"name": "dirichlet", "alpha": 0.1}, "algorithm": "fedavg"})
    assert held.partition == Dirichlet(alpha=0.1)
    assert isinstance(held.algorithm, FedAvg)


def test_settings_survive_a_round_trip() -> None:
    held = Holder(partition=Dirichlet(alpha=0.25), algorithm=FedAvg(local_epochs=2))
    dumped = held.model_dump(mode="json")
    assert dumped["partition"]["name"] == "dirichlet"
    assert Holder.model_validate(dumped) == held


def test_code_outside_polyfed_needs_no_registration() -> None:
    name = f"{Foreign.__module__}.Foreign"
    held = Holder.model_validate({"partition": "iid", "algorithm": {"name": name, "extra": 5}})
    assert isinstance(held.algorithm, Foreign)
    assert held.algorithm.extra == 5
    assert held.model_dump(mode="json")["algorithm"]["name"] == name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"partition": "dirichlt"}, "did you mean 'dirichlet'"),
        ({"partition": {"name": "dirichlet", "alfa": 1}}, "unknown key 'alfa'; did you mean 'alpha'"),
        ({"partition": {"name": "dirichlet", "alpha": -1}}, "greater than 0"),
        ({"partition": {"alpha": 1}}, "needs a name"),
        ({"partition": "os.path.join"}, "not a subclass"),
        ({"partition": "no.such.Thing"}, "cannot import"),
        ({"partition": "this.1"}, "'this.1' is not an import path; give it as package.module.Class"),
        ({"partition": "iid", "algoritm": 1}, "did you mean 'algorithm'"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_valid(content: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Holder.model_validate(content)


def test_every_method_is_found_without_a_list_of_them() -> None:
    assert {"creamfl", "fedavg", "local", "server_only"} <= set(Algorithm.available())
