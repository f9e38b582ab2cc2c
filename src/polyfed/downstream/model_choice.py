"""Which model is tested: a run's, a client's, or one that a file describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import isolated
from polyfed.data.samples import Samples
from polyfed.data.source import Source
from polyfed.data.view import DataContext, View
from polyfed.downstream.subject import ClientTests, Subject
from polyfed.federation.settings import DataSettings
from polyfed.models.model import Model, ModelSettings
from polyfed.runs.experiment import parse_settings, read_config
from polyfed.runs.opened import Run, open_run


class Opened(NamedTuple):
    """A subject, and the data settings and CPU threads that it comes with."""

    subject: Subject
    data: DataSettings
    threads: int


@dataclass(frozen=True)
class ModelChoice:
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
        subjects = _Subjects(self._opened_run(self.run))
        return subjects.server(self.which) if self.client is None else subjects.client(self.client)

    def _opened_run(self, folder: Path) -> Run:
        return open_run(folder, data_dir=self.data_dir, weights_dir=self.weights_dir, device=self.device)

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
            return _Subjects(self._opened_run(self.run)).described(settings, file.stem, self.seed)
        empty = DataSettings(sources={})
        given = {"dir": self.data_dir, "weights_dir": self.weights_dir}
        data = empty.model_copy(update={key: path.resolve() for key, path in given.items() if path is not None})
        context = DataContext(data.cache_folder, data.weights_folder, pixels=data.max_pixels)
        model = _drawn(settings, context, self.seed).to(resolve_device(self.device or "auto"))
        return Opened(Subject(file.stem, model, _views(settings), context), data, 2)


@dataclass(frozen=True)
class _Subjects:
    """The models of a run, and the test samples of its clients."""

    run: Run

    def server(self, which: str | None) -> Opened:
        if self.run.experiment.server is None:
            hint = f"--client ID, one of: {', '.join(self.run.federation.members) or 'none'}"
            raise ConfigError(f"run '{self.run.folder}' has no server model; test a client's with {hint}")
        server = self.run.server_model(which)
        title = f"{self.run.name}, {server.which} server model (round {server.round})"
        opened = self._opened(title, server.model, server.saved.settings, server.context, self._trained_on())
        server.warn_if_untrained()
        return opened

    def client(self, client: str) -> Opened:
        """A client's kept model, or the global model of its type where clients keep none."""
        run = self.run
        if "model" in run.experiment.algorithm.keeps:
            kept = run.kept_clients()
            model, settings = kept.model(client), kept.member(client).model
            title = f"{run.name}, model of client {client} (round {kept.versions[client][0]})"
        else:
            model, title = self._of_type(client)
            settings = run.federation.members[client].model
        return self._opened(title, model, settings, run.federation.data.context, self._trained_on())

    def described(self, settings: ModelSettings, name: str, seed: int) -> Opened:
        """A model of other settings, which the run did not train."""
        context = self.run.federation.data.context
        return self._opened(name, _drawn(settings, context, seed), settings, context, ())

    def _of_type(self, client: str) -> tuple[Model, str]:
        run = self.run
        members = run.federation.members
        if client not in members:
            raise ConfigError(f"no client '{client}' in '{run.folder}'; {nearest(client, members)}")
        kind = next(name for name, each in run.types.items() if client in {info.id for info in each.clients})
        if kind not in run.global_weights:
            raise ConfigError(
                f"clients of '{run.experiment.algorithm.component_name()}' keep no model in '{run.folder}', nor does "
                "the server for them; test the server's model"
            )
        return run.global_model(kind), f"{run.name}, global model of {kind} (round {run.checkpoint.round})"

    def _opened(
        self, title: str, model: Model, settings: ModelSettings, context: DataContext, known: tuple[Source, ...]
    ) -> Opened:
        experiment = self.run.experiment
        clients = self._tests(settings) if experiment.clients else None
        batch, model = experiment.run.evaluation_batch, model.to(self.run.place)
        subject = Subject(title, model, _views(settings), context, batch, clients, known)
        return Opened(subject, experiment.data, experiment.run.threads)

    def _trained_on(self) -> tuple[Source, ...]:
        experiment = self.run.experiment
        groups, public = experiment.clients, experiment.public
        also = [group.also.source for group in groups.values() if group.also is not None and group.also.source]
        held = [*(group.source for group in groups.values()), *also, *([public.source] if public else [])]
        names = dict.fromkeys(held)
        return tuple(experiment.data.sources[name] for name in names)

    def _tests(self, settings: ModelSettings) -> ClientTests:
        """Every client's test samples in the views of a model, of the modalities that both have."""

        @cache
        def test_samples() -> Mapping[str, Samples]:
            federation = self.run.federation
            tests = {name: federation.test(member, settings) for name, member in federation.members.items()}
            return {name: samples for name, samples in tests.items() if samples is not None}

        return test_samples


def _drawn(settings: ModelSettings, context: DataContext, seed: int) -> Model:
    """The model of a file: pretrained where it says so, the rest drawn at random."""
    with isolated(seed, "downstream", "encoders"):
        return settings.build({}, context)


def _views(settings: ModelSettings) -> dict[str, View]:
    return {modality: encoder.view for modality, encoder in settings.encoders.items()}
