"""Experiments: all settings of a run, validated before any work starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, Field, SerializeAsAny, ValidationError, field_validator, model_validator

from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.device import Threads
from polyfed.core.effects import NoEffectError
from polyfed.core.errors import ConfigError
from polyfed.core.settings import S, Settings, first_problem, innermost_problem, parse_settings
from polyfed.core.untrusted import yaml_content
from polyfed.engines.engine import EngineSettings
from polyfed.engines.local import InProcess
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.attack import Attack
from polyfed.federation.cohort import ReplyPolicy
from polyfed.federation.paces import LatePace, Pace, Sync
from polyfed.federation.participant import Precision
from polyfed.federation.sampling import SamplingSettings
from polyfed.federation.settings import (
    DataSettings,
    GroupName,
    GroupSettings,
    HostSettings,
    PublicSettings,
    ServerSettings,
    SiteSettings,
)
from polyfed.models.model import ModelSettings
from polyfed.privacy.policy import Policy
from polyfed.privacy.settings import AggregationSettings, PrivacySettings
from polyfed.runs.config_files import layers_of, portable_content, read_layers
from polyfed.runs.config_files import merged as merged
from polyfed.runs.config_files import read_config as read_config
from polyfed.runs.sink import Sink
from polyfed.runs.twins import TwinSettings, twin_content
from polyfed.wire.limits import Limits
from polyfed.wire.schema import steps_of
from polyfed.wire.transport import Transport

log = logging.getLogger(__name__)
_ABSENT = object()
_SHOWN_GROUPS = 5


def _share(value: int | float | None) -> int | float | None:
    if isinstance(value, float) and value > 1:  # 2.0 would read as two clients and count as twice all of them
        raise ValueError("min_clients is a share (a fraction, at most 1.0) or a number of clients (whole)")
    return value


Quorum = Annotated[int | float, Field(ge=0), AfterValidator(_share)]


class PhaseSettings(Settings):
    """Quorum and deadline of one of a method's steps; what is not given is that of the run."""

    min_clients: Quorum | None = Field(default=None, description="quorum, as run.min_clients")
    deadline: float | None = Field(default=None, gt=0, description="seconds, as run.deadline")


class RunSettings(Settings):
    """How a run is carried out."""

    rounds: int = Field(default=30, ge=1, description="T, communication rounds")
    seed: int = Field(default=0, ge=0, description="every random draw of the run derives from it")
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    pace: SerializeAsAny[Pace] = Field(
        default=Sync(), description="when the server takes a step: sync, buffered, async"
    )
    engine: SerializeAsAny[EngineSettings] = Field(default_factory=InProcess, description="where client steps execute")
    min_clients: Quorum = Field(
        default=1,
        description="quorum: fewer usable replies to an ask stop the run; a fraction is a share of those asked",
    )
    deadline: float | None = Field(default=None, gt=0, description="seconds a client has for an answer; None: no limit")
    phases: dict[str, PhaseSettings] = Field(
        default_factory=dict, description="client step -> quorum and deadline of its own"
    )
    attackers: tuple[SerializeAsAny[Attack], ...] = Field(
        default=(),
        description="simulated clients that attack, for measuring what protects from them: sign_flip, scaled, noise, "
        "constant, copied, little_is_enough, label_flip, targeted_pairs; one, or a list",
    )
    limits: Limits = Field(default_factory=Limits)
    eval_every: int = Field(default=1, ge=1, description="evaluate every so many rounds, and after the last")
    evaluate_clients: bool | Annotated[int, Field(ge=1)] = Field(
        default=True,
        description="every client's own test metrics at each evaluation; a number: of so many clients of each type "
        "in each group, which share one model and one test set",
    )
    evaluation_batch: int = Field(default=256, ge=1, description="samples a batch when no gradient is needed")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps, ...")
    threads: Threads = Field(
        default=None,
        validate_default=True,
        description="CPU threads; null: of the cores that this process may use, two at most. Part of the resolved "
        "configuration, since sums depend on it",
    )
    precision: Precision = Field(default="float32", description="autocast type of forward passes")
    transport: Transport = Field(default_factory=Transport)
    plots: bool = Field(default=True, description="draw figures at the end: PNG files, and in the report")
    sinks: list[SerializeAsAny[Sink]] = Field(
        default_factory=list, description="trackers that follow the run: tensorboard, wandb, mlflow"
    )
    keep_rounds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(),
        description="rounds after which the server's model is kept in the run folder, beside the last and the best; 0: "
        "before training",
    )
    keep_client_models: bool = Field(
        default=False,
        description="keep each client's model as it leaves its last step, for analyses, also where the method's "
        "clients start from the server's weights each round",
    )
    state_memory: int = Field(default=1 << 30, ge=0, description="bytes of client state held in memory at most")

    @field_validator("attackers", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, str | Mapping | Attack) else value

    @model_validator(mode="after")
    def _rounds_to_come(self) -> Self:
        late = [number for number in self.keep_rounds if number > self.rounds]
        if late:
            raise ValueError(f"keep_rounds has {late[0]}, but there are {self.rounds} rounds; leave it out")
        return self

    @model_validator(mode="after")
    def _simulated_attackers(self) -> Self:
        if self.attackers and self.engine.is_deployed:
            raise ValueError(
                "attackers are for simulations; a deployment's clients are not ours to corrupt: leave it out"
            )
        return self

    @property
    def quorums(self) -> dict[str, int]:
        """Key under ``run`` -> quorum, of those that are numbers of clients."""
        phases = {f"phases.{step}.min_clients": phase.min_clients for step, phase in self.phases.items()}
        quorums = {"min_clients": self.min_clients, **phases}
        return {key: quorum for key, quorum in quorums.items() if isinstance(quorum, int)}

    def reply_policy(self, step: str) -> ReplyPolicy:
        """Quorum and deadline of a client step."""
        own = self.phases.get(step, PhaseSettings())
        return ReplyPolicy(
            self.min_clients if own.min_clients is None else own.min_clients,
            self.deadline if own.deadline is None else own.deadline,
        )


class Experiment(Settings):
    """A complete, validated description of a run; running the same description gives the same result."""

    name: str = Field(default="experiment", description="shown in progress and reports")
    description: str = ""
    data: DataSettings
    public: PublicSettings | None = None
    server: ServerSettings | None = None
    clients: dict[GroupName, GroupSettings] = Field(default_factory=dict, description="group name -> clients of a kind")
    algorithm: SerializeAsAny[Algorithm]
    aggregation: AggregationSettings = Field(default_factory=AggregationSettings)
    privacy: PrivacySettings | None = Field(default=None, description="differential privacy of what clients send")
    run: RunSettings = Field(default_factory=RunSettings)
    twin: TwinSettings | None = Field(default=None, description="run a twin of the experiment in its place")

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Experiment:
        """Load a preset by name, a YAML file, or such a file's mapping, and apply ``path.to.key=value`` overrides.

        What an override, or a file, leaves without effect in what it builds on goes back to its default, and a warning
        says so; what it sets itself must have an effect. An experiment with ``twin`` becomes that twin.

        Raises:
            ConfigError: unknown preset or key, a value out of range or without effect, a file that is not YAML, an
                experiment that has no such twin, or settings that do not fit each other or the method.
            DataError: a source has no such split.
        """
        from polyfed.runs.preflight import require_settings  # which knows attacks: sites must not import it

        experiment = cls.read(source, overrides)
        require_settings(experiment)
        return experiment

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Experiment:
        """As ``load``, of what need not fit together yet, as it is built on or was fitted when it ran."""
        layers = layers_of(source, Path()) if isinstance(source, Mapping) else read_layers(source)
        content = reduce(merged, layers)
        made = content["twin"] if isinstance(content.get("twin"), Mapping) else {}
        for override in overrides:
            content = _override(content, override)
        named = [override.partition("=")[0] for override in overrides]
        if made.get("of") and any(name.split(".")[0] == "twin" for name in named):
            raise ConfigError(f"twin: this is a twin of '{made['of']}' already; give that experiment itself")
        experiment = _without_idle(cls, content, lambda path: _is_set(path, layers[-1], named))
        if experiment.twin is None or experiment.twin.of:
            return experiment
        return cls.parse(twin_content(experiment.model_dump(mode="json"), experiment.algorithm))

    @model_validator(mode="after")
    def _epochs_to_count(self) -> Self:
        for name, group in self.clients.items():
            if group.training.schedule.unit == "epoch" and not self.algorithm.counts_epochs:
                obstacle = "without clients that train for epochs, not for a number of steps"
                raise NoEffectError(f"clients.{name}.training.schedule.unit", "epoch", obstacle, "round")
        return self

    @model_validator(mode="after")
    def _tasks_of_the_method(self) -> Self:
        for name, group in self.clients.items():
            self.algorithm.require_task(f"clients.{name}.task", group.task)
        return self

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Experiment:
        """Validate a mapping.

        Raises:
            ConfigError: naming the first wrong key, its value and what would be valid.
        """
        return parse_settings(cls, content)

    def site(self) -> SiteSettings:
        """All its clients as one place that hosts them."""
        run = self.run
        host = HostSettings(
            device=run.device,
            threads=run.threads,
            evaluation_batch=run.evaluation_batch,
            state_memory=run.state_memory,
        )
        # a simulation hosts its clients as an institution hosts its own: one code path for both
        secret = self.privacy.secret.resolve() if self.privacy and self.privacy.secret else None
        return SiteSettings(data=self.data, public=self.public, clients=self.clients, run=host, secret=secret)

    @property
    def policy(self) -> Policy:
        """What protects the replies of clients, and the server from them."""
        steps, combining = steps_of(self.algorithm), self.aggregation
        privacy = self.privacy and self.privacy.resolved(steps, self.run.rounds)
        return Policy(self.algorithm, self.run.rounds, privacy, combining.secure, combining.clip, combining.robust)

    def spec(self, run: str, public_order: str) -> RunSpec:
        """What a place that hosts clients must know of a run of this experiment."""
        return RunSpec(
            run=run,
            seed=self.run.seed,
            rounds=self.run.rounds,
            algorithm=self.algorithm,
            precision=self.run.precision,
            transport=self.run.transport,
            server_model=self.server.model if self.server and self.algorithm.shares_encoders else None,
            public_order=public_order,
            keep_models=self.run.keep_client_models,
            attackers=self.run.attackers,
            privacy=self.policy.privacy,
            secure=self.aggregation.secure,
            late_replies=isinstance(self.run.pace, LatePace),
            evaluates=self.run.evaluate_clients is not False,
        )

    def __repr__(self) -> str:
        """What is trained by whom, how and how long, in at most ten lines."""

        def encoders(model: ModelSettings) -> str:
            return " + ".join(f"{name} by {encoder.component_name()}" for name, encoder in model.encoders.items())

        run, server, public = self.run, self.server, self.public
        groups = [
            f"  {name}: {group.count} clients, {group.source}, "
            f"{group.task.component_name()}, {encoders(group.models[0])}"
            for name, group in self.clients.items()
        ]
        if len(groups) > _SHOWN_GROUPS:
            groups = [*groups[: _SHOWN_GROUPS - 1], f"  ... {len(groups)} groups in all"]
        lines = [
            f"Experiment '{self.name}': {self.algorithm.component_name()}, {run.rounds} rounds, seed {run.seed}",
            f"  public set: {f'{public.items} items of {public.source}' if public else 'none'}",
            f"  server: {f'{server.task.component_name()}, {encoders(server.model)}' if server else 'no model'}",
            *groups,
            f"  privacy: {'on' if self.privacy else 'off'}; engine {run.engine.component_name()}, device {run.device}",
            "  all settings: print(experiment.to_yaml())",
        ]
        return "\n".join(lines)

    def to_yaml(self, folder: Path | None = None) -> str:
        """The resolved configuration: every default written out; of the working folder, if it is given, no path."""
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the same text, three times faster
        content = self.model_dump(mode="json")
        if folder is not None:
            content = portable_content(content, folder, self.data.data_folder)
        return yaml.dump(content, Dumper=dumper, sort_keys=False, allow_unicode=True)


def _without_idle(kind: type[S], content: dict[str, Any], is_own: Callable[[str], bool]) -> S:
    """Settings of the content without what was inherited and has no effect beside what was set on top of it."""
    # one at a time: with one back at its default, another may have an effect again
    while True:
        try:
            return kind.model_validate(content)
        except ValidationError as error:
            section, problem = innermost_problem(error)
            refusal = problem.get("ctx", {}).get("error")
            if not isinstance(refusal, NoEffectError):
                raise ConfigError(first_problem(error)) from error
            path = ".".join((*section, refusal.name))  # whose name may be a path itself
            if is_own(path):
                raise ConfigError(first_problem(error)) from error
            message = "%s: %s has no effect %s; left at its default, %s"
            log.warning(message, path, refusal.value, refusal.obstacle, refusal.default)
            content = _removed(content, path.split("."))


def _is_set(path: str, top: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Whether a setting is set by an override or, where there are none, by the topmost file."""
    if overrides:
        return any(f"{path}.".startswith(f"{name}.") for name in overrides)
    value: Any = top
    for key in path.split("."):
        if isinstance(value, list) and key.isdigit():
            value = dict(enumerate(value)).get(int(key))
        else:
            value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return value is not _ABSENT


def _removed(content: Any, keys: Sequence[str]) -> Any:
    if isinstance(content, list):
        position = int(keys[0])
        return [*content[:position], _removed(content[position], keys[1:]), *content[position + 1 :]]
    if len(keys) == 1:
        return {key: value for key, value in content.items() if key != keys[0]}
    return {**content, keys[0]: _removed(content[keys[0]], keys[1:])}


def _override(content: Mapping[str, Any], text: str) -> dict[str, Any]:
    path, sign, value = text.partition("=")
    if not sign or not path:
        raise ConfigError(f"--set {text}: needs the form path.to.key=value")
    changed: dict[str, Any] = _set(content, path.split("."), _parse_value(value), path)
    return changed


def _parse_value(text: str) -> Any:
    try:
        return yaml_content(text)
    except ValueError:
        return text  # such as "a: b: c", which is no YAML; whether a text is valid here, the setting's type decides


def _set(content: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    if not keys:
        return value
    key, below = keys[0], keys[1:]
    if isinstance(content, list) and key.isdigit() and int(key) < len(content):
        position = int(key)
        return [*content[:position], _set(content[position], below, value, path), *content[position + 1 :]]
    section = _section(content, key, path)
    if path != "name" and list(keys) == ["name"] and section.get("name") != value:
        section = {}  # another component: settings of the old one do not apply
    return {**section, key: _set(section.get(key), below, value, path)}


def _section(content: Any, key: str, path: str) -> Mapping[str, Any]:
    if isinstance(content, str):  # a component given by its bare name
        return {"name": content}
    if content is not None and not isinstance(content, Mapping):
        raise ConfigError(f"--set {path}: '{key}' is below a value, not a section")
    return content or {}
