"""Each setting of every method changes the result, or is refused; optimisers train, at the rates of their schedules."""

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
from torch.optim import Optimizer

from by_hand import as_left, copies, play
from grids import mostly_slow
from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import isolated
from polyfed.core.settings import Settings, is_component
from polyfed.federation import trainer
from polyfed.federation.settings import TrainingSettings
from polyfed.optim.settings import OptimizerSettings
from polyfed.runs.config_files import merged
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import prepared, round_records, woken
from small_federations import ADAPTED, METHODS, NAMED, Config, federation_for, participants

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


# ---- optimisers and schedules


FORMS: dict[str, Config] = {method: {} for method in METHODS} | {
    "change_distillation:gradient": {"digest": {"by": "gradient"}, "linear": True},
    "fedafd:alternate": {"adversarial": {"update": "alternate"}},
    "fedmd:digest": {"digest": {"epochs": 1}},
}
"""Methods with their defaults, and forms in which some parameters get their first gradient in a later step."""
OPTIMIZERS: dict[str, Config] = {
    "sgd": {"kind": "sgd", "weight_decay": 0.01},
    "sgd-clipped": {"kind": "sgd", "clip": 1.0},
    "sgd-plain": {"kind": "sgd", "momentum": 0.0},
    "adam": {"kind": "adam", "clip": 1.0},
    "adamw": {"kind": "adamw", "weight_decay": 0.01},
    "adamp": {"kind": "adamp", "weight_decay": 0.01},
}
THROUGHOUT = {"fedavg"}
"""With every optimiser."""
IN_TURN = {"fedmd:digest", "fedafd:alternate"}
"""With two: two loops in turn; two optimisers over parts of a model."""
SLOW = {"creamfl_averaged", "fed_mae", "fedaid", "fedcola", "feddra", "fedema", "fediot", "fedprox", *ADAPTED, *NAMED}
SLOW = SLOW - {"fedit"} | {"change_distillation", "fedafd", "fedet", "fedgems", "fedmd", "fedmkd", "moon"}
"""Slow: they step once per batch over all that trains, as ``fedavg`` and ``fedit`` do, or take seconds."""


def optimizer_cases() -> Iterator[Any]:
    """Every method with momentum; three with other optimisers, of which all but AdamP are slow."""
    for form, optimizer in itertools.product(FORMS, OPTIMIZERS):
        if form in THROUGHOUT or optimizer == "sgd" or (form in IN_TURN and optimizer == "adamp"):
            marks = pytest.mark.slow if form in SLOW or optimizer not in ("sgd", "adamp") else ()
            yield pytest.param(form, optimizer, marks=marks, id=f"{form}-{optimizer}")


@pytest.mark.parametrize(("form", "optimizer"), list(optimizer_cases()))
def test_all_reply_and_all_move(form: str, optimizer: str, tmp_path: Path) -> None:
    session = prepared(_config(form, OPTIMIZERS[optimizer] | {"lr": 0.01}), tmp_path)
    before = _parameters(session)
    for number in (1, 2):
        play(session, number, number)
        assert not [record for record in round_records(session) if record["kind"] == "event"]
    after = _parameters(session)
    assert all(value.isfinite().all() for tensors in after.values() for value in tensors.values())
    assert not {owner for owner in after if not _moved(before[owner], after[owner])}


def _config(form: str, optimizer: Config) -> Config:
    """Participants, and the trainings that a method has of its own, with this optimiser."""
    config = federation_for(form.split(":")[0], **FORMS[form])
    for participant in participants(config):
        participant["training"] = {"optimizer": optimizer, "batch_size": 8}
    algorithm = Experiment.parse(config).algorithm
    fields = type(algorithm).model_fields
    trainings = [name for name in fields if isinstance(getattr(algorithm, name), TrainingSettings)]
    config["algorithm"] |= {name: {"optimizer": optimizer} for name in trainings}
    return config


def _parameters(session: Session) -> dict[str, dict[str, Tensor]]:
    """Tensors of the server's model, of the global models by type, and of clients that keep a model or a part."""
    server, groups = session.server, dict[str, dict[str, Tensor]]()
    for client in session.server.clients if "model" in session.experiment.algorithm.keeps else ():
        model = (as_left if client.id in session.cohorts.accepted else woken)(session, client.id).model
        names = {name for name, _ in model.named_parameters()}
        groups |= copies({client.id: {name: value for name, value in model.state_dict().items() if name in names}})
    if server.has_model and session.experiment.algorithm.component_name() != "local":  # it trains no server
        groups |= copies({"server": dict(server.model.named_parameters())})
    return groups | copies({f"global {type_name}": dict(tensors) for type_name, tensors in server.weights.items()})


def _moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    return any(not value.equal(after[name]) for name, value in before.items())


# ---- schedules by epoch


SCHEDULE = {"kind": "exponential", "decay": 0.5, "unit": "epoch"}
EPOCHS = 3
IN_STEPS = {"fedaid", "feddra"}
"""Methods one of whose stages is a number of batches, which count as one epoch."""


def by_epochs(method: str, epochs: int) -> Config:
    """The method's federation with so many epochs in every loop, and a schedule by epochs for every optimiser."""
    fields = Algorithm.named(method).model_fields
    settings: Config = {name: epochs for name in fields if name.endswith("_epochs")}
    settings |= {name: None for name in fields if name == "local_steps"}
    for name, field in fields.items():
        if isinstance(field.default, Settings):
            settings[name] = _in_epochs(field.default, epochs)
    config = federation_for(method, **settings)
    for participant in (*config["clients"].values(), *([config["server"]] if "server" in config else [])):
        participant["training"] = dict(participant.get("training", {})) | {"schedule": SCHEDULE}
    return config


def _in_epochs(section: Settings, epochs: int) -> Config:
    """The content of a section with so many epochs and with schedules; a joint task has those of the distillation."""
    content = section.model_dump(mode="json")
    for name in type(section).model_fields:
        value = getattr(section, name)
        if name == "epochs" and getattr(section, "order", "") != "joint":
            content[name] = epochs
        elif name == "steps":
            content[name] = epochs  # of so many batches
        elif isinstance(value, TrainingSettings):
            content[name] |= {"schedule": SCHEDULE}
    return content | ({"schedule": SCHEDULE} if isinstance(section, TrainingSettings) else {})


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Factors on the rate of every optimiser that is built, step by step."""
    make, used = trainer._optimizer, list[list[float]]()

    def spied(model: Any, settings: OptimizerSettings, parameters: Any) -> Optimizer:
        optimizer, factors = make(model, settings, parameters), list[float]()
        used.append(factors)
        optimizer.register_step_pre_hook(lambda *_: factors.append(optimizer.param_groups[0]["lr"] / settings.lr))
        return optimizer

    monkeypatch.setattr(trainer, "_optimizer", spied)
    return used


QUICK = {"centralised", "creamfl", "fedaid", "fedavg", "fedgems", "fedmd", "server_only"}
"""Methods that between them have every kind of loop over epochs; the others, which have the same loops, are slow."""


@pytest.mark.parametrize("method", mostly_slow(METHODS, *QUICK))
def test_rates_follow_the_schedule_by_epoch(tmp_path: Path, used: list[list[float]], method: str) -> None:
    """Factors on the rate of every optimiser in both rounds: 1 and 1/2, then 1/4 and 1/8, in each loop."""
    session = prepared(by_epochs(method, 2), tmp_path)
    for number, (first, second) in ((1, (1, 0.5)), (2, (0.25, 0.125))):
        used.clear()
        play(session, number, number)
        stages = {_stages(factors) for factors in used if factors}
        assert stages, "nothing was trained"
        loops = stages - ({(first,)} if method in IN_STEPS else set())
        assert loops
        for factors in loops:
            assert list(factors) == [first, second] * (len(factors) // 2)


def test_loops_of_any_length_begin_where_the_local_epochs_do(tmp_path: Path, used: list[list[float]]) -> None:
    config = by_epochs("fedmd", EPOCHS)
    config["algorithm"] |= {"digest": {"epochs": 2}, "task": {"epochs": 2}}
    config["algorithm"]["distiller"] = {"epochs": 4}
    session = prepared(config, tmp_path)
    play(session, 1, 1)
    used.clear()
    play(session, 2, 2)
    begun = 0.5**EPOCHS  # of clients: the digest, then the revisit
    of = {length: tuple(begun * 0.5**epoch for epoch in range(length)) for length in (2, 3, 4)}
    assert {_stages(factors) for factors in used if factors} == {
        of[2],
        of[4],
        of[2] + of[3],
    }  # the digest, then the revisit


def _stages(factors: list[float]) -> tuple[float, ...]:
    """Factors in order, without repetitions in a row."""
    return tuple(round(factor, 12) for factor, _ in itertools.groupby(factors))
