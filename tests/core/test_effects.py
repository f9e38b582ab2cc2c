"""When settings have an effect: conditions, what is refused, and what listings say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field

from polyfed.cli.catalogue import settings_of
from polyfed.core.effects import Always, Condition, Facts, Inner, Never, Not, Only, Where, conditions_of
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.runs.experiment import Experiment
from polyfed.runs.presets import presets

Config = dict[str, Any]


class Frame(Settings):
    size: int = 1
    crowded: Annotated[int, Where("a crowd")] = 1


class Base(Settings):
    mode: str = "a"
    on: bool = False
    weight: float = 1.0
    depth: Annotated[int, Only(on=True)] = 2
    width: Annotated[int, Only(mode={"a", "b"}) & (Only(on=True) | Only(weight=Not(0)))] = 3
    part: Annotated[Frame, Inner(size=Never("the whole decides"))] = Field(default=Frame())
    limit: Annotated[int | None, Only(on=True)] = 5
    spare: Annotated[Frame | None, Inner(size=Only(on=True))] = Field(default=Frame())

    def facts_for(self, key: str) -> Facts:
        return {"a crowd": self.on} if key == "part" else {}


class Derived(Base):
    only_if: ClassVar[Mapping[str, Condition]] = {"on": Never("it is always off"), "width": Always()}

    depth: int = 7  # another default, under the same condition


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Base, {"on": True, "depth": 3}),
        (Base, {"depth": 2, "on": False}),  # the default, written out
        (Base, {"width": 4, "mode": "b"}),
        (Base, {"width": 4, "weight": 0, "on": True}),
        (Base, {"on": True, "part": {"crowded": 2}}),
        (Base, {"on": True, "limit": None}),
        (Base, {"spare": None}),  # has no size that could be without effect
        (Derived, {"depth": 7, "width": 9, "mode": "c"}),
    ],
)
def test_settings_with_an_effect_are_taken(kind: type[Settings], settings: Config) -> None:
    found = kind(**settings)
    assert kind.model_validate(found.model_dump(mode="json")) == found  # as a run folder has it


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            Base,
            {"depth": 3},
            r"depth has no effect with on: false; it is 3: leave it at 2 \(it acts only with on: true",
        ),
        (Base, {"width": 4, "mode": "c"}, "width has no effect with mode: c; it is 4: leave it at 3"),
        (Base, {"width": 4, "weight": 0}, "with on: false and with weight: 0.0"),
        (
            Base,
            {"part": {"size": 5}},
            r"part\.size has no effect here \(the whole decides\); it is 5: leave it at 1$",
        ),
        (Base, {"limit": None}, "limit has no effect with on: false; it is null: leave it at 5"),
        (Base, {"part": {"crowded": 2}}, r"part\.crowded has no effect without a crowd"),
        (Derived, {"depth": 2}, "depth has no effect with on: false; it is 2: leave it at 7"),
        (Derived, {"on": True}, r"on has no effect here \(it is always off\)"),
    ],
)
def test_settings_without_effect_are_refused(kind: type[Settings], settings: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


def test_conditions_are_told_in_words() -> None:
    assert str(conditions_of(Base)["width"]) == "mode: a or b and (on: true or weight other than 0)"


def test_a_condition_of_no_field_is_a_mistake() -> None:
    class Mistaken(Settings):
        only_if: ClassVar[Mapping[str, Condition]] = {"width": Always()}

    with pytest.raises(TypeError, match=r"Mistaken\.only_if names 'width', which is no field"):
        Mistaken()


def test_listings_say_when_a_setting_has_an_effect() -> None:
    told = {setting.name: setting.description for setting in settings_of("settings", "training.schedule")}
    assert "; only with kind: cosine" in told["t_max"]
    assert "only with" not in told["kind"]


@pytest.mark.parametrize("name", presets())
def test_resolved_presets_load_again(name: str) -> None:
    experiment = Experiment.load(name)
    assert Experiment.parse(experiment.model_dump(mode="json")) == experiment


# ---- what surrounds settings


def test_a_schedule_by_epoch_needs_clients_that_count_epochs(tiny: Config) -> None:
    schedule = {"kind": "exponential", "unit": "epoch"}
    tiny["clients"]["image"]["training"] = {"schedule": schedule}
    Experiment.parse(tiny)
    with pytest.raises(ConfigError, match=r"clients\.image\.training\.schedule\.unit has no effect without clients"):
        Experiment.parse(tiny | {"algorithm": {"name": "fedavg", "local_steps": 3}})
