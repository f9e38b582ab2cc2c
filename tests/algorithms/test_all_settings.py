"""Every setting of every method: another value changes the result, or is refused. New settings need no entry here."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel
from settings_to_flip import COMPANIONS, EQUAL, REFUSED, VALUES
from torch import Tensor

from by_hand import as_left, copies
from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import isolated
from polyfed.core.settings import Settings, is_component
from polyfed.federation.settings import TrainingSettings
from polyfed.runs.config_files import merged
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import prepared, round_records
from small_federations import ADAPTED, METHODS, Config, federation_for

Result = Mapping[str, Tensor]
COSTLY = {"creamfl_averaged", "fed_mae", "fedafd", "fedaid", "fedcola", "feddra", "fedema", "fediot", *ADAPTED}
TOLERANCE = 5e-6
"""Relative to the largest number: less is rounding."""


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) is None or get_origin(annotation) in (Literal, dict, tuple):
        return (annotation,)
    return tuple(part for type_name in get_args(annotation) for part in _alternatives(type_name))


class Setting(NamedTuple):
    """One of a method, perhaps in a section."""

    path: str
    annotation: Any
    declared: tuple[type, str]


def settings_of(type_name: type[BaseModel], path: str = "") -> Iterator[Setting]:
    """All settings of a method, also of its sections; and each section that may be null."""
    for name, info in type_name.model_fields.items():
        own = f"{path}.{name}" if path else name
        kinds = _alternatives(info.annotation)
        section = next((one for one in kinds if _is_section(one)), None)
        if section is None or type(None) in kinds:
            yield Setting(own, info.annotation, (declaring(type_name, name), name))
        if section is not None:
            yield from settings_of(type(info.default) if isinstance(info.default, Settings) else section, own)


def _is_section(type_name: Any) -> bool:
    is_settings = isinstance(type_name, type) and issubclass(type_name, Settings)
    return is_settings and not is_component(type_name) and type_name is not TrainingSettings


def cases() -> Iterator[Any]:
    """Each setting of each method; those of costly methods are slow, and those that an earlier method has alike."""
    met = set()
    for method in sorted(METHODS, key=lambda name: name in COSTLY):
        for setting in settings_of(Algorithm.named(method)):
            is_slow = method in COSTLY or setting.declared in met
            met.add(setting.declared)
            marks = pytest.mark.slow if is_slow else ()
            yield pytest.param(method, setting, marks=marks, id=f"{method}-{setting.path}")


def declaring(type_name: type[BaseModel], field: str) -> type:
    """The class that defines a field last."""
    return next(base for base in type_name.__mro__ if field in inspect.get_annotations(base))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "setting"), list(cases()))
def test_another_value_changes_the_result_or_is_refused(folder: Path, method: str, setting: Setting) -> None:
    path = setting.path
    changed = _at(path, another(method, setting))
    if (method, path) in REFUSED:
        assert refused(method, changed)
        return
    companion = COMPANIONS.get((method, path), COMPANIONS.get(("", path), {}))
    assert companion or not refused(method, changed), "give what the setting needs in COMPANIONS"
    alone = {} if refused(method, companion) else companion  # of two settings that need each other
    before, after = played(folder, method, alone), played(folder, method, merged(companion, changed))
    assert alike(before, after) == ((method, path) in EQUAL)


def _at(path: str, value: Any) -> Config:
    first, _, others = path.partition(".")
    return {first: _at(others, value) if others else value}


def refused(method: str, settings: Config) -> bool:
    """Whether settings are refused."""
    try:
        Experiment.parse(federation_for(method, **settings))
    except ConfigError:
        return True
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Results of all sessions."""
    yield tmp_path_factory.mktemp("effects")
    _known.clear()


_known: dict[str, Stages] = {}


class Stages:
    """Results after the first round, after the second, and with what clients then measure; made when asked for."""

    def __init__(self, made: Iterator[Result]) -> None:
        self.made, self.results = made, list[Result]()

    def __iter__(self) -> Iterator[Result]:
        for number in itertools.count():
            if number == len(self.results):
                try:
                    self.results.append(next(self.made))
                except StopIteration:
                    return
            yield self.results[number]


def played(folder: Path, method: str, settings: Config) -> Stages:
    key = f"{method}-{sorted(settings.items(), key=str)}"
    if key not in _known:
        _known[key] = Stages(_played(folder / f"{len(_known)}", federation_for(method, **settings)))
    return _known[key]


def _played(folder: Path, config: Config) -> Iterator[Result]:
    """Models, metrics and bytes."""
    session = prepared(config, folder)
    algorithm, server, numbers = session.experiment.algorithm, session.server, dict[str, float]()
    for number in (1, 2):
        server.begin(number)
        ledger = Ledger()
        with isolated(session.experiment.run.seed, number, "server"):
            algorithm.round(server, session.cohort(number, ledger))
        for record in round_records(session):
            numbers |= {f"{number}-{key}": value for key, value in record.get("metrics", {}).items()}
        for line in ledger.records:
            key = f"{number}-{line['client']}-{line['direction']}-{line['kind']}"
            numbers[key] = numbers.get(key, 0) + line["bytes"]
        yield _tensors(session) | _as_tensors(numbers)
    judged = algorithm.evaluate_clients(server, session.cohort(2, Ledger()))
    yield _as_tensors({f"{client}-{key}": value for client, own in judged.items() for key, value in own.items()})


def _as_tensors(numbers: Mapping[str, float]) -> Result:
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}


def _tensors(session: Session) -> dict[str, Tensor]:
    """Digests of all models, and of the server's state."""
    server = session.server
    groups: dict[str, Mapping[str, Tensor]] = dict(server.weights)
    for name in session.cohorts.accepted:  # one at a time: clients of one architecture share a live model
        groups |= copies({name: as_left(session, name).model.state_dict()})
    groups |= {f"state-{name}": tensors for name, tensors in server.state.items()}
    if server.has_model:
        groups["server"] = server.model.state_dict()
    return {f"{group}-{name}": value.clone() for group, tensors in groups.items() for name, value in tensors.items()}


def alike(one: Stages, other: Stages) -> bool:
    """Whether all results are the same up to rounding; ends with the first stage in which they are not."""
    return all(
        before.keys() == after.keys() and all(_close(value, after[key]) for key, value in before.items())
        for before, after in zip(one, other, strict=True)
    )


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = max(1.0, float(one.double().abs().max())) if one.numel() else 1.0
    return torch.allclose(one.double(), other.double(), rtol=0, atol=TOLERANCE * scale, equal_nan=True)


def another(method: str, setting: Setting) -> Any:
    """A valid value of a setting that is not its default."""
    for key in ((method, setting.path), ("", setting.path)):
        if key in VALUES:
            return VALUES[key]
    default = Experiment.parse(federation_for(method)).algorithm
    for part in setting.path.split("."):
        default = getattr(default, part, None)
    return _flipped(setting.annotation, default)


def _flipped(annotation: Any, default: Any) -> Any:
    type_name = next(kind for kind in _alternatives(annotation) if kind is not type(None))
    if _is_section(type_name):
        assert default is not None, "no content is known of a section that is null; give one in VALUES"
        return None
    if get_origin(type_name) is Literal:
        return next(value for value in get_args(type_name) if value != default)
    if type_name is bool:
        return not default
    if is_component(type_name):
        return next(name for name in type_name.available() if name != default.component_name())
    if type_name is TrainingSettings:
        return _faster(default)
    if type_name is int:
        return 3 if default is None else default + 1
    assert type_name is float, f"no other value is known of a {annotation}; give one in VALUES"
    return 0.3 if not default else default / 2


def _faster(training: TrainingSettings | None) -> Config:
    plain = (training or TrainingSettings()).model_dump(mode="json")
    return plain | {"optimizer": plain["optimizer"] | {"kind": "adam", "lr": 0.05}}
