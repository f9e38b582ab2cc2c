"""``open_run``: the one way to a run folder's experiment, records, data and models.

Reports and comparisons read records only, so this module imports torch for data and models alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.core.files import paths_from, require_plain, whole
from polyfed.core.untrusted import code_of
from polyfed.runs.folder import FOLDERS, Checkpoint, RunFolder, chosen_model, saved_models, untrained_best
from polyfed.runs.records import SERVER, RunRecords

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor, nn

    from polyfed.data.view import DataContext, View
    from polyfed.federation.membership import Member
    from polyfed.federation.population import Population
    from polyfed.federation.types import ClientType
    from polyfed.models.model import Model, ModelSettings
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.loaded import LoadedModel
    from polyfed.tasks.task import Task
    from polyfed.wire.messages import StateVersion

log = logging.getLogger(__name__)

_JUDGING = ("device", "threads", "precision", "evaluation_batch")  # settings that evaluating a model takes


def open_run(
    folder: Path | str,
    *,
    data_dir: Path | str | None = None,
    weights_dir: Path | str | None = None,
    device: str | None = None,
    allow_code: bool = False,
) -> Run:
    """Open a run, finished or not; files are read when they are used.

    Args:
        folder: Run folder.
        data_dir: Folder of data sets; by default the run's, else POLYFED_DATA.
        weights_dir: Folder of pretrained weights; by default the run's, else POLYFED_WEIGHTS.
        device: Device of models; by default the run's.
        allow_code: Import classes that the run names by import path (``core.untrusted.code_of``), and ask the hub for
            its pretrained networks.

    Raises:
        RunError: it is not a run folder, or holds anything but files and folders, or a link that leads out of it.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise RunError(f"'{folder}' is not a run folder (no config.yaml in it); give the folder of a run")
    require_plain(folder, inside=FOLDERS)
    data, weights = (None if path is None else whole(path) for path in (data_dir, weights_dir))
    return Run(folder, data, weights, device, allow_code)


def as_run(run: Run | Path | str) -> Run:
    """An open run, or that of a folder, opened with its own data, weights and device."""
    return run if isinstance(run, Run) else open_run(run)


@dataclass(frozen=True)
class Run:
    """A run on disk, see ``open_run``."""

    folder: Path
    data_dir: Path | None = None
    weights_dir: Path | None = None
    device: str | None = None
    allow_code: bool = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    # ---- what the run recorded

    @cached_property
    def records(self) -> RunRecords:
        return RunRecords.load(self.folder)

    def metrics(self, participant: str = "server", kind: str = "test") -> Mapping[str, float]:
        """Metrics of the run's model: the server's of ``records.chosen``, a client's of its last evaluation."""
        return self.records.metrics(participant, kind)

    def to_pandas(self, table: Literal["metrics", "events", "traffic", "rounds"] = "metrics") -> pd.DataFrame:
        """Records as a pandas frame, one row per record; columns as for ``RunRecords.frame``."""
        return self.records.frame(table)

    def _repr_html_(self) -> str:
        """A short table for notebooks: rounds, warnings, and test metrics of the server's model and of groups."""
        rows = [("rounds", str(self.records.rounds)), *(("warning", text) for text in self.records.warnings)]
        rows += [(SERVER, str(self.records.chosen))] if self.records.metric_names(SERVER) else []
        for group, members in {SERVER: (SERVER,), **self.records.groups}.items():
            measured = [self.metrics(member) for member in members]
            for metric in dict.fromkeys(chain(*measured)):
                values = [metrics[metric] for metrics in measured if metric in metrics]
                rows.append((f"{group} {metric}, test", f"{sum(values) / len(values):.4g}"))
        body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
        return f"<table><caption>{escape(self.name)}</caption><tbody>{body}</tbody></table>"

    @cached_property
    def files(self) -> RunFolder:
        """The run folder.

        Raises:
            RunError: it is incomplete, or its configuration was edited.
        """
        return RunFolder.existing(self.folder)

    # ---- settings and data

    @cached_property
    def experiment(self) -> Experiment:
        """The run's settings, with data and weights at their present folders.

        Raises:
            RunError: the folder is incomplete, or its configuration was edited.
            ConfigError: it names code, which ``allow_code`` does not allow.
        """
        return self._settings(self._config)

    def with_rounds(self, rounds: int) -> tuple[Experiment, str]:
        """The run's settings with another number of rounds, and the text of its configuration then."""
        from polyfed.runs.config_files import config_text, with_value

        content = with_value(self._config, ["run", "rounds"], rounds, "run.rounds")
        return self._settings(content), config_text(content)

    @cached_property
    def conditions(self) -> Experiment:
        """Settings for evaluating a saved model: data, server, device; without the method, whose code may be absent."""
        content = self._config
        run = content.get("run", {})
        judging = {key: run[key] for key in _JUDGING if key in run} if isinstance(run, dict) else run
        kept = {key: content[key] for key in ("name", "data", "server") if key in content}
        return self._settings(kept | {"algorithm": "server_only", "run": judging})

    @property
    def _config(self) -> dict[str, Any]:
        from polyfed.runs.config_files import resolved_config

        return resolved_config(self.files.path / "config.yaml")

    def _settings(self, content: Mapping[str, Any]) -> Experiment:
        from polyfed.runs.config_files import start_of
        from polyfed.runs.experiment import Experiment

        with code_of(self.folder, self.allow_code), paths_from(start_of(self.folder)):
            experiment = Experiment.read(content)
        folders = {"dir": self.data_dir, "weights_dir": self.weights_dir}
        moved = {key: folder for key, folder in folders.items() if folder is not None}
        return experiment.model_copy(update={"data": experiment.data.model_copy(update=moved)})

    @cached_property
    def federation(self) -> Population:
        """Data and models of all participants, with the vocabularies that the run learnt."""
        from polyfed.runs.server_side import build_federation

        federation = build_federation(self.experiment, self.files)
        federation.data.hub = self.allow_code  # else the hub would reveal the reader to the folder's author
        return federation

    @cached_property
    def place(self) -> torch.device:
        """Device of models.

        Raises:
            ConfigError: the device is not available.
        """
        from polyfed.core.device import resolve_device

        return resolve_device(self.device or self.conditions.run.device)

    # ---- models

    @cached_property
    def newest_checkpoint(self) -> Checkpoint | None:
        return self.files.newest_checkpoint()[0]

    @property
    def checkpoint(self) -> Checkpoint:
        """The newest readable checkpoint.

        Raises:
            RunError: there is none.
        """
        if self.newest_checkpoint is None:
            raise RunError(f"run '{self.folder}' has no readable checkpoint; finish it with polyfed resume")
        return self.newest_checkpoint

    def model_folder(self, which: str | None = None) -> Path:
        """Folder of a saved model: ``which`` by name or round, by default ``best`` if there is one, else ``last``.

        Raises:
            RunError: the run has no such model.
        """
        saved = saved_models(self.files.path)
        name = chosen_model(saved, which)
        if name is None:
            model = f"model '{which}'" if which else "one model" if saved else "saved model"
            raise RunError(f"run '{self.folder}' has no {model}; {self._instead(saved, which)}")
        return self.files.path / "models" / name

    def _instead(self, saved: Mapping[str, int | None], which: str | None) -> str:
        """Models of the run for an error about a missing one, or the reason that it has none."""
        has = ", ".join(f"{name} (round {number})" for name, number in saved.items())
        if saved and which is None:
            return f"it has one for each type of clients: {has}; name it (--model {next(iter(saved))})"
        if saved:
            return f"it has: {has}; run.output.keep_rounds names the rounds whose models a run keeps"
        if self._config.get("server"):
            return "no round is complete yet (polyfed resume)"
        if not self._config.get("clients"):
            return (
                "it has no server with data, and models of sites stay at the sites; with a server (polyfed init "
                "--public FOLDER, before polyfed deploy init) it has the server's"
            )
        client = next(iter(self.records.holdings), "")
        return (
            "it has no server, and no common model was saved: its method averages no weights, no round is complete, or "
            f"an older version began it; a client's is open_run('{self.folder}').model_of('{client}'), of polyfed "
            f"downstream --client {client}"
        )

    def server_model(self, which: str | None = None) -> ServerModel:
        """The run's saved model: the server's, or the clients' common one; ``which`` as for ``model_folder``.

        Raises:
            RunError: the model does not exist, or it is damaged.
            ConfigError: the device or a weights folder of the architecture is missing; or the model names code, which
                ``allow_code`` does not allow.
        """
        from polyfed.runs.saved import read_model

        folder = self.model_folder(which)
        saved = read_model(folder, self.conditions.data, self.place, allow_code=self.allow_code)
        content, facts = (saved.weights, saved.config, saved.context, saved.model), saved.facts
        classes = facts.samples.classes if facts.samples else {}
        return ServerModel(self, folder, *content, facts.round, facts.model, facts.task, saved.head, classes)

    @cached_property
    def types(self) -> Mapping[str, ClientType]:
        """Types of the clients by name."""
        from polyfed.federation.types import client_types

        return client_types(self.federation.infos)

    @cached_property
    def global_weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Type of clients -> weights of its global model, for methods with global models.

        Raises:
            RunError: no checkpoint is readable.
        """
        from polyfed.federation.state import unflatten

        groups = unflatten(self.checkpoint.tensors)
        return {name: groups[f"weights:{name}"] for name in self.types if f"weights:{name}" in groups}

    def global_model(self, client_type: str) -> Model:
        """The global model of a type of clients, in evaluation mode, on the device.

        Raises:
            RunError: its weights do not fit the model.
        """
        member = self.federation.members[self.types[client_type].clients[0].id]
        weights = self.global_weights[client_type]
        return self._loaded(member, weights, f"the global model of '{client_type}' does not fit its clients'")

    def _loaded(self, member: Member, weights: Mapping[str, Tensor], misfit: str) -> Model:
        """A client's model with weights from disk, in evaluation mode, on the device."""
        from polyfed.models.model import require_weights

        model = self.federation.client_model(member)
        try:
            require_weights(weights, model.exchanged())
            model.load(weights)
        except RuntimeError as error:
            raise RunError(f"{misfit} ({' '.join(str(error).split())})") from error
        return model.to(self.place).eval()

    @property
    def model(self) -> LoadedModel:
        return self.model_of()

    def model_of(self, participant: str = "server", which: str | None = None) -> LoadedModel:
        """The model of the server or of a client; of a run without a server the clients' common one.

        A client without a kept model has the global model of its type.

        Args:
            participant: ``server``, or a client's id.
            which: Saved model of the run, as for ``model_folder``.

        Raises:
            RunError: the model does not exist, or it is damaged.
            ConfigError: the participant does not exist, its model is not kept, or ``which`` is given for a client.
        """
        from polyfed.runs.loaded import loaded_model

        if participant == SERVER:
            server = self.server_model(which)
            decision = server.task, server.head, server.classes
            model_name = f"{server.kind} of {self.name}, round {server.round}"
            return loaded_model(model_name, server.model, server.views, server.context, *decision)
        if which is not None:
            raise ConfigError(f"model '{which}': of client '{participant}' one model is kept, its newest; leave it out")
        members = self.federation.members
        if participant not in members:
            hint = nearest(participant, [SERVER, *members])
            raise ConfigError(f"no participant '{participant}' in '{self.folder}'; {hint}")
        member, model = members[participant], self._model_of_client(participant)
        views = {modality: encoder.view for modality, encoder in member.model.encoders.items()}
        head = dict(model.heads.items()).get(member.head)
        decision = member.settings.task, head, self.federation.train(member).classes
        name = f"{participant} of {self.name}"
        return loaded_model(name, model, views, self.federation.data.context, *decision)

    def _model_of_client(self, client: str) -> Model:
        if not self.has_client_models:
            for name, clients in self.types.items():
                if name in self.global_weights and client in {info.id for info in clients.clients}:
                    return self.global_model(name)
        return self.client_model(client)

    @property
    def has_client_models(self) -> bool:
        return "model" in self.experiment.algorithm.keeps or self.experiment.run.output.keep_client_models

    # ---- clients

    @cached_property
    def clients(self) -> Mapping[str, StateVersion]:
        """Clients with a kept model that had taken part by the last complete round -> step of their kept state.

        Raises:
            RunError: no client has taken part yet.
            ConfigError: clients keep no model, or live at sites; or the device is not available.
        """
        from polyfed.runs.cohorts import accepted_in

        algorithm = self.experiment.algorithm
        if not self.has_client_models:
            raise ConfigError(
                f"clients of '{algorithm.component_name()}' keep no model in '{self.folder}': each round they start "
                "from weights that the server sends; give a run with run.output.keep_client_models, or of a method "
                "whose clients keep one, such as creamfl, fedafd or local"
            )
        if not self.experiment.clients:
            own = self.folder
            raise ConfigError(f"the clients of '{own}' live at sites, and so do their models; give a simulated run")
        _ = self.place  # a missing device is reported before anything is read
        accepted = {} if self.newest_checkpoint is None else accepted_in(self.newest_checkpoint.facts)
        if not accepted:
            raise RunError(f"no client of run '{self.folder}' has taken part in a complete round yet (polyfed resume)")
        return {name: accepted[name] for name in self.federation.members if name in accepted}

    def client(self, name: str) -> Member:
        """One of ``clients``.

        Raises:
            ConfigError: it does not exist, or never took part.
        """
        if name not in self.clients:
            raise ConfigError(f"no client '{name}' took part in '{self.folder}'; {nearest(name, self.clients)}")
        return self.federation.members[name]

    def client_state(self, name: str) -> dict[str, dict[str, Tensor]]:
        """Key -> named tensors of a client's kept state.

        Raises:
            RunError: its state is missing or damaged.
        """
        from polyfed.federation.state import StateStore, unflatten

        store = StateStore(self.folder / "checkpoints" / "clients", 0)
        return unflatten(store.load(name, self.clients[name]))

    def client_model(self, name: str, state: Mapping[str, Mapping[str, Tensor]] | None = None) -> Model:
        """A client's kept model, in evaluation mode, on the device; from ``state`` if that is read already.

        Raises:
            RunError: its state is missing, damaged, or not of this model.
        """
        member = self.client(name)
        weights = (state or self.client_state(name)).get("model", {})
        return self._loaded(member, weights, f"the kept state of client '{name}' does not fit its model")


@dataclass(frozen=True)
class ServerModel:
    """A run's saved model.

    Attributes:
        run: Run of the model.
        folder: Folder of the model.
        weights: Trained and frozen weights.
        config: Content of its ``config.json``; the attributes below hold the same, checked.
        context: Vocabularies of its views, read from the folder: no public set is needed.
        model: The model in evaluation mode, on the run's device.
        round: Round after which it was saved.
        settings: Its architecture.
        task: Its task.
        head: Head of its task, if that has one.
        classes: Names of the classes of each target.
    """

    run: Run
    folder: Path
    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    context: DataContext
    model: Model
    round: int
    settings: ModelSettings
    task: Task
    head: nn.Module | None
    classes: Mapping[str, tuple[str, ...]]

    @property
    def which(self) -> str:
        """``best``, ``last`` or ``round-N``; of several types of clients with one of these, as ``last-north``."""
        return self.folder.name

    @property
    def kind(self) -> str:
        """``server model`` or ``common model``, for messages."""
        return "server model" if self.run.conditions.server is not None else "common model"

    @property
    def views(self) -> Mapping[str, View]:
        return {modality: encoder.view for modality, encoder in self.settings.encoders.items()}

    def warn_if_untrained(self) -> None:
        """Warn if it is the best model and untrained; called just before its use, when no refusal can follow."""
        if self.which == "best" and (sentence := untrained_best(self.run.folder)):
            log.warning("%s", sentence)
