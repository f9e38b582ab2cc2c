"""Which model is tested: a run's, a client's, or one that a file describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.files import whole
from polyfed.core.randomness import isolated
from polyfed.core.settings import parse_settings
from polyfed.data.samples import Samples
from polyfed.data.view import DataContext
from polyfed.federation.settings import DataSettings
from polyfed.lab.downstream.bench import FrozenModel
from polyfed.models.model import Model, ModelSettings
from polyfed.runs.config_files import read_config
from polyfed.runs.opened import Run, open_run


class Opened(NamedTuple):
    """A model, and the data settings and CPU threads that it comes with."""

    subject: FrozenModel
    data: DataSettings
    threads: int


@dataclass(frozen=True)
class ModelChoice:
    """Which model is tested.

    Attributes:
        run: folder of a run, or None.
        which: ``best``, ``last``, or a round, of the server's models; by default best if there is one.
        client: id of a client, whose own model is wanted instead.
        encoders: YAML file with ``ModelSettings``, whose model is wanted instead.
        seed: of what is drawn at random in ``encoders``.
        data_dir, weights_dir, device: other folders or another device than the run's.
        allow_code: import what the run names by import path, see ``polyfed.open_run``.
    """

    run: Path | None = None
    which: str | None = None
    client: str | None = None
    encoders: Path | None = None
    seed: int = 42
    data_dir: Path | str | None = None
    weights_dir: Path | str | None = None
    device: str | None = None
    allow_code: bool = False

    def open(self) -> Opened:
        """The model, frozen, in evaluation mode, on its device.

        Raises:
            ConfigError: contradicting options, a wrong file, no such client, or no server model.
            RunError: no run folder, or no model in it.
        """
        if self.client is not None and self.which not in (None, "last"):
            raise ConfigError(f"--model {self.which} is the server's; of a client there is only its last model")
        if self.encoders is not None:
            return self._described(self.encoders)
        run = self._run()
        if run is None:
            raise ConfigError("nothing to test: give the folder of a run, or --encoders FILE.yaml")
        return _server(run, self.which) if self.client is None else _client(run, self.client)

    def _run(self) -> Run | None:
        if self.run is None:
            return None
        return open_run(
            self.run,
            data_dir=self.data_dir,
            weights_dir=self.weights_dir,
            device=self.device,
            allow_code=self.allow_code,
        )

    def _described(self, file: Path) -> Opened:
        """The model of a file, pretrained where it says so and else drawn at random; with the data of a run, if any."""
        if self.client or self.which:
            raise ConfigError("--encoders is a model of its own: leave out --client and --model")
        settings, run = parse_settings(ModelSettings, read_config(file)), self._run()
        given = {"dir": self.data_dir, "weights_dir": self.weights_dir}
        folders = {key: whole(path) for key, path in given.items() if path is not None}
        data = DataSettings(sources={}).model_copy(update=folders)
        context = DataContext(data.cache_folder, data.weights_folder, pixels=data.max_pixels, seed=self.seed)
        context = context if run is None else run.federation.data.context
        with isolated(self.seed, "downstream", "encoders"):
            model = settings.build({}, context)
        if run is not None:  # whose clients' test samples can then be searched
            return _of_run(run, file.stem, model, settings, context)
        views = {modality: encoder.view for modality, encoder in settings.encoders.items()}
        model = model.to(resolve_device(self.device or "auto"))
        return Opened(FrozenModel(file.stem, model, views, context), data, 2)


def _server(run: Run, which: str | None) -> Opened:
    if run.experiment.server is None:
        hint = f"--client ID, one of: {', '.join(run.federation.members) or 'none'}"
        raise ConfigError(f"run '{run.folder}' has no server model; test a client's with {hint}")
    server = run.server_model(which)
    title = f"{run.name}, {server.which} server model (round {server.round})"
    opened = _of_run(run, title, server.model, server.settings, server.context)
    server.warn_if_untrained()  # when nothing can be refused any more
    return opened


def _client(run: Run, client: str) -> Opened:
    """A client's kept model, or the global model of its type where clients keep none."""
    members = run.federation.members
    if run.has_client_models:
        model, settings = run.client_model(client), run.client(client).model
        title = f"{run.name}, model of client {client} (round {run.clients[client][0]})"
    elif client not in members:
        raise ConfigError(f"no client '{client}' in '{run.folder}'; {nearest(client, members)}")
    else:
        kind = next(name for name, each in run.types.items() if client in {info.id for info in each.clients})
        if kind not in run.global_weights:
            raise ConfigError(
                f"clients of '{run.experiment.algorithm.component_name()}' keep no model in '{run.folder}', nor does "
                "the server for them; test the server's model"
            )
        model, settings = run.global_model(kind), members[client].model
        title = f"{run.name}, global model of {kind} (round {run.checkpoint.round})"
    return _of_run(run, title, model, settings, run.federation.data.context)


def _of_run(run: Run, title: str, model: Model, settings: ModelSettings, context: DataContext) -> Opened:
    """A model with the data of a run, and the test samples of its clients in the model's views."""

    @cache  # the samples are opened when a task asks for them
    def client_tests() -> Mapping[str, Samples]:
        tests = {name: run.federation.test(member, settings) for name, member in run.federation.members.items()}
        return {name: samples for name, samples in tests.items() if samples is not None}

    experiment = run.experiment
    clients = client_tests if experiment.clients else None
    views = {modality: encoder.view for modality, encoder in settings.encoders.items()}
    subject = FrozenModel(title, model.to(run.place), views, context, experiment.run.evaluation_batch, clients)
    return Opened(subject, experiment.data, experiment.run.threads)
