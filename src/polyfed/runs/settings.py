"""All settings of an experiment: what describes a run, with what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import AfterValidator, Field, PrivateAttr, SerializeAsAny, field_validator, model_validator

from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.device import Threads
from polyfed.core.files import start_of_paths
from polyfed.core.settings import NoEffectError, PlaceBeside, Settings
from polyfed.engines.engine import EngineSettings
from polyfed.engines.local import InProcess
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.attack import Attack
from polyfed.federation.cohort import ReplyPolicy
from polyfed.federation.paces import Buffered, Pace, Sync
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
from polyfed.runs.config_files import config_text, portable_content
from polyfed.runs.records import sites_among
from polyfed.runs.sink import Sink
from polyfed.runs.sites import CommonSettings, NamedSite, with_sites
from polyfed.runs.twins import TwinSettings
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Cause
from polyfed.wire.schema import steps_of
from polyfed.wire.transport import Transport

_SHOWN_GROUPS = 5


def _share(value: int | float | None) -> int | float | None:
    if isinstance(value, float) and value > 1:  # 2.0 would read as two clients and count as twice all of them
        raise ValueError("min_clients is a share (a fraction, at most 1.0) or a number of clients (whole)")
    return value


Quorum = Annotated[int | float, Field(ge=0), AfterValidator(_share)]


class PhaseSettings(Settings):
    """Quorum and deadline of one of a method's steps; what is not given is that of the run."""

    min_clients: Quorum | None = Field(default=None, description="quorum, as run.exchange.min_clients")
    deadline: float | None = Field(default=None, gt=0, description="seconds, as run.exchange.deadline")


class ExchangeSettings(Settings):
    """How the server and its clients exchange messages."""

    min_clients: Quorum = Field(
        default=1,
        description="quorum: fewer usable replies to an ask stop the run; a fraction is a share of those asked",
    )
    deadline: float | None = Field(default=None, gt=0, description="seconds for a client's answer; None: no limit")
    phases: dict[str, PhaseSettings] = Field(
        default_factory=dict, description="client step -> quorum and deadline of its own"
    )
    on_error: Literal["stop", "exclude"] | None = Field(
        default=None,
        description="an error in a client's step, or a reply that cannot be used: stop the run, or exclude the client "
        "from the round; null: stop, but exclude on flower, and where run.attackers may falsify replies exclude for "
        "these. Who is lost, late or refuses is excluded always. Short: run.on_error",
    )
    transport: Transport = Field(default_factory=Transport)
    limits: Limits = Field(default_factory=Limits)

    @property
    def quorums(self) -> dict[str, int]:
        """Key under ``run.exchange`` -> quorum, of those that are numbers of clients."""
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


class OutputSettings(Settings):
    """Displays of a run, and records in addition to the usual ones; no setting changes a figure."""

    plots: bool | Literal["page"] = Field(
        default=True, description="draw figures at the end: PNG files, and in the report; page: there alone"
    )
    sinks: list[SerializeAsAny[Sink]] = Field(
        default_factory=list, description="trackers that follow the run: tensorboard, wandb"
    )
    keep_rounds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(),
        description="rounds after which the run's model is kept in the run folder, next to the last and the best; 0: "
        "before training",
    )
    keep_client_models: bool = Field(
        default=False,
        description="keep each client's model as it leaves its last step, for analyses, also where the method's "
        "clients start from the server's weights each round",
    )


class RunSettings(Settings):
    """How a run is carried out; ``on_error`` is short for that of ``exchange``."""

    short_form: ClassVar[str] = "on_error"

    rounds: int = Field(default=30, ge=1, description="T, communication rounds")
    seed: int = Field(default=0, ge=0, description="every random draw of the run derives from it")
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    pace: SerializeAsAny[Pace] = Field(default=Sync(), description="when the server takes a step: sync, buffered")
    engine: SerializeAsAny[EngineSettings] = Field(default_factory=InProcess, description="where client steps execute")
    exchange: ExchangeSettings = Field(default_factory=ExchangeSettings)
    attackers: tuple[SerializeAsAny[Attack], ...] = Field(
        default=(),
        description="simulated clients that attack, for measuring what protects from them: sign_flip, scaled, noise, "
        "constant, label_flip; one, or a list",
    )
    eval_every: int = Field(default=1, ge=1, description="evaluate every so many rounds, and after the last")
    evaluate_clients: bool | Annotated[int, Field(ge=1)] = Field(
        default=True,
        description="every client's own test metrics at each evaluation; a number: of so many clients of each type "
        "in each group, which share one model and one test set",
    )
    evaluation_batch: int = Field(default=256, ge=1, description="samples per batch when no gradient is needed")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps, ...")
    threads: Threads = Field(
        default=None,
        validate_default=True,
        description="CPU threads; null: of the cores that this process may use, two at most. Part of the resolved "
        "configuration, since sums depend on it",
    )
    precision: Precision = Field(default="float32", description="autocast type of forward passes")
    state_memory: int = Field(default=1 << 30, ge=0, description="bytes of client state held in memory at most")
    output: OutputSettings = Field(default_factory=OutputSettings)

    @property
    def on_error(self) -> Literal["stop", "exclude"]:
        """Effect of an error in a client's step, or of a reply that cannot be used."""
        return self.exchange.on_error or ("exclude" if self.engine.crosses_wire else "stop")

    @property
    def stopped_by(self) -> frozenset[Cause]:
        """Causes of a client's failure that stop the run, as they are its author's to mend."""
        if self.on_error == "exclude":
            return frozenset()
        # what attacks do to replies, and to models from which others go on, is what such a run measures
        is_tolerant = self.exchange.on_error is None and self.attackers
        return frozenset({Cause.FAILED} if is_tolerant else {Cause.FAILED, Cause.INVALID})

    @model_validator(mode="before")
    @classmethod
    def _short_on_error(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or cls.short_form not in data:
            return data
        exchange = {**dict(data.get("exchange") or {}), cls.short_form: data[cls.short_form]}
        return {key: value for key, value in data.items() if key != cls.short_form} | {"exchange": exchange}

    @field_validator("attackers", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, str | Mapping | Attack) else value

    @model_validator(mode="after")
    def _rounds_to_come(self) -> Self:
        late = [number for number in self.output.keep_rounds if number > self.rounds]
        if late:
            raise ValueError(f"output.keep_rounds has {late[0]}, but there are {self.rounds} rounds; leave it out")
        return self


class InitialModels(Settings):
    """Models of another run from which a run starts: the server's, global models, and those that clients keep."""

    run: PlaceBeside = Field(description="folder of the run")
    round: int | None = Field(default=None, ge=0, description="one of its last two complete rounds; null: the last")
    salt: str | None = Field(default=None, description="key of the names of its heads; null: that of the run's folder")


class ExperimentSettings(Settings):
    """All that describes a run."""

    name: str = Field(default="experiment", description="shown in progress and reports")
    description: str = ""
    sites: dict[GroupName, NamedSite] = Field(
        default_factory=dict,
        exclude=True,
        description="site -> its data, and what of it differs from `common`; it becomes a group of one client and a "
        "source of that name, `clients.SITE` and `data.sources.SITE`",
    )
    common: CommonSettings | None = Field(
        default=None, exclude=True, description="settings of all sites and the server, unless they have their own"
    )
    data: DataSettings
    public: PublicSettings | None = None
    server: ServerSettings | None = None
    clients: dict[GroupName, GroupSettings] = Field(default_factory=dict, description="group name -> clients of a kind")
    algorithm: SerializeAsAny[Algorithm]
    aggregation: AggregationSettings = Field(default_factory=AggregationSettings)
    privacy: PrivacySettings | None = Field(default=None, description="differential privacy of what clients send")
    run: RunSettings = Field(default_factory=RunSettings)
    twin: TwinSettings | None = Field(default=None, description="run a twin of the experiment in its place")
    initial: InitialModels | None = Field(default=None, description="start from the models of another run")
    _start: Path = PrivateAttr(default_factory=start_of_paths)

    @model_validator(mode="before")
    @classmethod
    def _sites_as_groups(cls, data: Any) -> Any:
        return with_sites(data) if isinstance(data, Mapping) else data

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

    def site(self) -> SiteSettings:
        """All its clients as one place that hosts them."""
        run = self.run
        host = HostSettings(**{name: getattr(run, name) for name in HostSettings.model_fields})
        # a simulation hosts its clients as an institution hosts its own: one code path for both
        secret = self.privacy and self.privacy.secret
        return SiteSettings(data=self.data, public=self.public, clients=self.clients, run=host, secret=secret)

    @property
    def site_names(self) -> tuple[str, ...]:
        """Its groups that are institutions with data of their own (``sites_among``); empty where there are none."""
        return sites_among({name: (group.count, group.source) for name, group in self.clients.items()})

    @property
    def policy(self) -> Policy:
        """Protection of clients' replies, and of the server from them."""
        steps, combining = steps_of(self.algorithm), self.aggregation
        privacy = self.privacy and self.privacy.resolved(steps, self.run.rounds)
        return Policy(self.algorithm, self.run.rounds, privacy, combining.secure, combining.clip, combining.robust)

    @property
    def salt(self) -> str:
        """Key of the digests of class names: the federation's name; empty with attackers, whom no site joins."""
        own = "" if self.run.attackers else self.name
        return own if self.initial is None or self.initial.salt is None else self.initial.salt

    @pydantic.model_serializer(mode="wrap")
    def _as_before(self, dump: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """All settings; without ``initial``, which came later, where there is none."""
        content: dict[str, Any] = dump(self)
        return content if self.initial is not None else {key: content[key] for key in content if key != "initial"}

    def spec(self, run: str, public_order: str) -> RunSpec:
        """Facts of a run of this experiment for hosts of its clients."""
        return RunSpec(
            run=run,
            seed=self.run.seed,
            rounds=self.run.rounds,
            algorithm=self.algorithm,
            salt=self.salt,
            precision=self.run.precision,
            transport=self.run.exchange.transport,
            server_model=self.server.model if self.server and self.algorithm.shares_encoders else None,
            public_order=public_order,
            keep_models=self.run.output.keep_client_models,
            attackers=self.run.attackers,
            privacy=self.policy.privacy,
            secure=self.aggregation.secure,
            late_replies=isinstance(self.run.pace, Buffered),
            evaluates=self.run.evaluate_clients is not False,
        )

    def __repr__(self) -> str:
        """Groups, models, method and rounds, in at most ten lines."""

        def parts(one: ServerSettings | GroupSettings, model: ModelSettings) -> str:
            encoders = (f"{name} by {encoder.component_name()}" for name, encoder in model.encoders.items())
            return f"{one.task.component_name()}, {' + '.join(encoders)}"

        run, server, public = self.run, self.server, self.public
        groups = [
            f"  {name}: {group.count} clients, {group.source}, {parts(group, group.models[0])}"
            for name, group in self.clients.items()
        ]
        if len(groups) > _SHOWN_GROUPS:
            groups = [*groups[: _SHOWN_GROUPS - 1], f"  ... {len(groups)} groups in all"]
        lines = [
            f"Experiment '{self.name}': {self.algorithm.component_name()}, {run.rounds} rounds, seed {run.seed}",
            f"  public set: {f'{public.items} items of {public.source}' if public else 'none'}",
            f"  server: {parts(server, server.model) if server else 'no model'}",
            *groups,
            f"  privacy: {'on' if self.privacy else 'off'}; engine {run.engine.component_name()}, device {run.device}",
            "  all settings: print(experiment.to_yaml())",
        ]
        return "\n".join(lines)

    @property
    def start(self) -> Path:
        """The folder from which relative paths started when these settings were read."""
        return self._start

    def to_yaml(self, folder: Path | None = None) -> str:
        """The resolved configuration: every default written out; of a folder, if it is given, no path."""
        content = self.model_dump(mode="json")
        return config_text(content if folder is None else portable_content(content, folder, self.data.data_folder))
