"""Subjects from run folders and from files with encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from polyfed.analysis.kept_clients import KeptClients
from polyfed.analysis.opened import Where
from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.core.randomness import isolated
from polyfed.data.samples import Samples
from polyfed.data.source import Source
from polyfed.data.view import DataContext, View
from polyfed.downstream.subject import ClientTests, Subject
from polyfed.federation.population import Population
from polyfed.federation.settings import DataSettings
from polyfed.federation.state import unflatten
from polyfed.federation.types import client_types
from polyfed.models.model import Model, ModelSettings
from polyfed.runs.experiment import Experiment, parse_settings, read_config
from polyfed.runs.folder import Checkpoint, RunFolder
from polyfed.runs.saved import load_model, model_folder, moved, run_experiment, run_federation, warn_of_untrained


class Opened(NamedTuple):
    """A subject, and the data settings and CPU threads that it comes with."""

    subject: Subject
    data: DataSettings
    threads: int


@dataclass(frozen=True)
class Wanted:
    """Which model is tested.

    Attributes:
        run: folder of a run, or None.
        which: ``best`` or ``last`` server model; by default best if there is one.
        client: id of a client, whose own model is wanted instead.
        encoders: YAML file with ``ModelSettings``, whose model is wanted instead.
        seed: of what is drawn at random in ``encoders``.
        data_dir, weights_dir, device: other folders or another device than the run's.
    """

    run: Path | None = None
    which: str | None = None
    client: str | None = None
    encoders: Path | None = None
    seed: int = 42
    data_dir: Path | None = None
    weights_dir: Path | None = None
    device: str | None = None

    def open(self) -> Opened:
        """The model, frozen, in evaluation mode, on its device.

        Raises:
            ConfigError: contradicting options, a wrong file, no such client, or no server model.
            RunError: no run folder, or no model in it.
        """
        self._require_consistent()
        if self.encoders is not None:
            return self._bare(self.encoders)
        assert self.run is not None
        opened = _Run.of(self.run, self)
        return opened.server(self.which) if self.client is None else opened.client(self.client)

    def _require_consistent(self) -> None:
        if self.run is None and self.encoders is None:
            raise ConfigError("nothing to test: give the folder of a run, or --encoders FILE.yaml")
        if self.encoders is not None and (self.client or self.which):
            raise ConfigError("--encoders is a model of its own: leave out --client and --model")
        if self.client is not None and self.which == "best":
            raise ConfigError("--model best is the server's; of a client there is only its last model")

    def _bare(self, file: Path) -> Opened:
        settings = parse_settings(ModelSettings, read_config(file))
        if self.run is not None:
            return _Run.of(self.run, self).with_encoders(settings, file.stem, self.seed)
        empty = DataSettings(sources={})
        given = {"dir": self.data_dir, "weights_dir": self.weights_dir}
        data = empty.model_copy(update={key: path.resolve() for key, path in given.items() if path is not None})
        context = DataContext(data.cache_folder, data.weights_folder, pixels=data.max_pixels)
        model = _drawn(settings, context, self.seed).to(resolve_device(self.device or "auto"))
        return Opened(Subject(file.stem, model, _views(settings), context), data, 2)


@dataclass(frozen=True)
class _Run:
    """A run folder's configuration and data."""

    folder: Path
    experiment: Experiment
    federation: Population
    wanted: Wanted

    @classmethod
    def of(cls, run: Path, wanted: Wanted) -> _Run:
        RunFolder.existing(run)  # complains if it is none
        experiment = moved(run_experiment(run), wanted.data_dir, wanted.weights_dir)
        federation = run_federation(run, experiment)
        return cls(run, experiment, federation, wanted)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def server(self, which: str | None) -> Opened:
        if self.experiment.server is None:
            hint = f"--client ID, one of: {', '.join(self.federation.members) or 'none'}"
            raise ConfigError(f"run '{self.folder}' has no server model; test a client's with {hint}")
        folder = model_folder(self.folder, which)
        saved = load_model(folder)
        context = saved.context(self.experiment.data.cache_folder, self.experiment.data.weights_folder)
        title = f"{self.name}, {folder.name} server model (round {saved.config['round']})"
        opened = self._opened(title, saved.build(context), saved.settings, context)
        warn_of_untrained(folder)
        return opened

    def client(self, client: str) -> Opened:
        """A client's kept model, or the global model of its type where clients keep none."""
        if "model" in self.experiment.algorithm.keeps:
            wanted = self.wanted
            kept = KeptClients.of(self.folder, Where("last", wanted.data_dir, wanted.weights_dir, wanted.device))
            model, settings = kept.model(client), kept.member(client).model
            title = f"{self.name}, model of client {client} (round {kept.labels[client][0]})"
        else:
            model, title = self._of_type(client)
            settings = self.federation.members[client].model
        return self._opened(title, model, settings, self.federation.data.context)

    def with_encoders(self, settings: ModelSettings, name: str, seed: int) -> Opened:
        context = self.federation.data.context
        return self._opened(name, _drawn(settings, context, seed), settings, context)

    def _of_type(self, client: str) -> tuple[Model, str]:
        members = self.federation.members
        if client not in members:
            raise ConfigError(f"no client '{client}' in '{self.folder}'; {nearest(client, members)}")
        kinds = client_types(self.federation.infos)
        kind = next(name for name, each in kinds.items() if client in {info.id for info in each.clients})
        newest = self._newest()
        groups = unflatten(newest.tensors)
        if f"weights:{kind}" not in groups:
            raise ConfigError(
                f"clients of '{self.experiment.algorithm.component_name()}' keep no model in '{self.folder}', nor does "
                "the server for them; test the server's model"
            )
        model = self.federation.client_model(members[client])
        model.load_state_dict(dict(groups[f"weights:{kind}"]))
        return model, f"{self.name}, global model of {kind} (round {newest.round})"

    def _newest(self) -> Checkpoint:
        found = RunFolder.existing(self.folder).checkpoints()
        newest = next((each for each in found if isinstance(each, Checkpoint)), None)
        if newest is None:
            raise RunError(f"run '{self.folder}' has no readable checkpoint; finish it with polyfed resume")
        return newest

    def _opened(self, title: str, model: Model, settings: ModelSettings, context: DataContext) -> Opened:
        run = self.experiment.run
        device = resolve_device(self.wanted.device or run.device)
        clients = self._tests(settings) if self.experiment.clients else None
        known = () if self.wanted.encoders else self._trained_on()
        subject = Subject(title, model.to(device), _views(settings), context, run.evaluation_batch, clients, known)
        return Opened(subject, self.experiment.data, run.threads)

    def _trained_on(self) -> tuple[Source, ...]:
        groups, public = self.experiment.clients, self.experiment.public
        also = [group.also.source for group in groups.values() if group.also is not None and group.also.source]
        held = [*(group.source for group in groups.values()), *also, *([public.source] if public else [])]
        names = dict.fromkeys(held)
        return tuple(self.experiment.data.sources[name] for name in names)

    def _tests(self, settings: ModelSettings) -> ClientTests:
        """Every client's test samples in the views of a model, of the modalities that both have."""

        @cache
        def found() -> Mapping[str, Samples]:
            members = self.federation.members
            tests = {name: self.federation.test(member, settings) for name, member in members.items()}
            return {name: samples for name, samples in tests.items() if samples is not None}

        return found


def _drawn(settings: ModelSettings, context: DataContext, seed: int) -> Model:
    """The model of a file: pretrained where it says so, the rest drawn at random."""
    with isolated(seed, "downstream", "encoders"):
        return settings.build({}, context)


def _views(settings: ModelSettings) -> dict[str, View]:
    return {modality: encoder.view for modality, encoder in settings.encoders.items()}
