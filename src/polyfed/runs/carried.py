"""Runs that build on others: more rounds of the same run, and a run that starts from the models of another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Self

from torch import Tensor

from polyfed.core.errors import ConfigError, PayloadError, nearest
from polyfed.federation.server import Server
from polyfed.federation.state import StateStore, flatten, unflatten
from polyfed.federation.types import outline_of, require_outline
from polyfed.runs.cohorts import accepted_in
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import VOCABULARY, Checkpoint
from polyfed.runs.opened import Run, open_run
from polyfed.runs.preflight import schedules_in
from polyfed.runs.settings import InitialModels
from polyfed.wire.messages import StateVersion

log = logging.getLogger(__name__)
_SHOWN = 160  # characters
_START: StateVersion = (0, 0)  # version of the states that clients have before their first step
_SERVERS, _GLOBAL, _CLIENTS = "the server's model", "the global model of '{}'", "the model of '{}'"


def lengthened(run: Run, rounds: int) -> tuple[Experiment, str]:
    """The experiment of a run with another number of rounds, and its ``config.yaml``.

    Raises:
        ConfigError: as many rounds are complete, or with this number they would have been others.
    """
    before, done = run.experiment, run.newest_checkpoint.round if run.newest_checkpoint else 0
    if rounds <= done:
        raise ConfigError(f"rounds: {rounds}, but '{run.folder}' has {done} complete rounds; give more than {done}")
    longer, config = run.with_rounds(rounds)
    spread = {path: f"'{schedule.kind}' spreads over" for path, schedule in schedules_in(before) if schedule.spans_run}
    obstacles = {
        "run.engine: the sites have agreed to": before.run.engine.is_deployed,
        "aggregation.secure: the keys of masks are made for": before.aggregation.secure is not None,
        "privacy: noise and budget are planned for": before.privacy is not None,  # draws depend on the number, too
        **{f"{path}: {reason}": True for path, reason in spread.items()},
    }
    is_other = rounds != before.run.rounds or before.run.engine.is_deployed
    for obstacle in (text for text, is_one in obstacles.items() if is_one and is_other):
        raise ConfigError(
            f"rounds: {rounds}, but {obstacle} {before.run.rounds} rounds; begin a new run: polyfed run "
            f"{run.folder / 'config.yaml'} --rounds {rounds}, from these models with --from {run.folder}"
        )
    if done == before.run.rounds and done % before.run.eval_every:
        text = "run.eval_every is %d: round %d was evaluated as the last one, and its figures stay"
        log.warning(text, before.run.eval_every, done)
    return longer, config


def with_round(experiment: Experiment) -> Experiment:
    """The experiment with the round of its initial models filled in."""
    if experiment.initial is None:
        return experiment
    run, checkpoint = _checkpoint(experiment.initial)
    initial = experiment.initial.model_copy(update={"round": checkpoint.round, "salt": run.files.salt})
    return experiment.model_copy(update={"initial": initial})


def _checkpoint(settings: InitialModels) -> tuple[Run, Checkpoint]:
    """The run that settings name, and its checkpoint of the round."""
    run = open_run(settings.run)
    checkpoint, others = run.files.newest_checkpoint(
        lambda one: "" if settings.round in (None, one.round) else f"round {one.round}"
    )
    if checkpoint is None:
        wanted = "any round" if settings.round is None else f"round {settings.round}"
        raise ConfigError(f"initial: '{run.folder}' has no checkpoint of {wanted}; it has: {', '.join(others)}")
    return run, checkpoint


def _model_in(states: StateStore, client: str, version: StateVersion) -> Mapping[str, Tensor]:
    return unflatten(states.load(client, version))["model"]


@dataclass(frozen=True)
class CarriedModels:
    """The models of a run after one of its rounds.

    Attributes:
        run: The run.
        round: Number of the round.
        models: Name in words -> function that returns its tensors.
    """

    run: Run
    round: int
    models: Mapping[str, Callable[[], Mapping[str, Tensor]]]
    _taken: list[str] = field(init=False, default_factory=list)

    @classmethod
    def of(cls, settings: InitialModels) -> Self:
        """The models that settings name.

        Raises:
            ConfigError: The run has no checkpoint of the round.
            RunError: It is not a run folder, its configuration was edited, or a client's model is lost.
        """
        run, checkpoint = _checkpoint(settings)
        groups, models = unflatten(checkpoint.tensors), dict[str, Callable[[], Mapping[str, Tensor]]]()
        for group in groups:
            part, _, own = group.partition(":")
            if part in ("model", "weights"):
                models[_GLOBAL.format(own) if own else _SERVERS] = partial(groups.__getitem__, group)
        states = StateStore(run.folder / "checkpoints" / "clients", memory=0)  # there may be many
        for client, version in accepted_in(checkpoint.facts).items():
            if states.versions(client) and "model" in unflatten(states.load(client, version)):
                models[_CLIENTS.format(client)] = partial(_model_in, states, client, version)
        return cls(run, checkpoint.round, models)

    def start(
        self, server: Server, setup: Callable[[Server], None], folder: Path, states: StateStore | None
    ) -> tuple[str, dict[str, StateVersion]]:
        """Prepare a server and its clients with these models.

        Args:
            server: Server of the new run, before ``setup``.
            setup: Prepares the method.
            folder: Folder of the new run, with the vocabularies of its views.
            states: Store of the clients' models; None: they keep none.

        Returns:
            The models in words; client -> version of its state, of those that have a model.

        Raises:
            ConfigError: A model of the new run has no counterpart of the same shapes and words.
        """
        words, known = ({file.name for file in (one / VOCABULARY).glob("*")} for one in (folder, self.run.folder))
        if words - known:
            raise self._refusal("its public set has other words")
        averaged, own = (any(name.startswith(form[:-4]) for name in self.models) for form in (_GLOBAL, _CLIENTS))

        if server.has_model and _SERVERS in self.models:
            server.load_weights(self._take(_SERVERS, server.model.exchanged()))
        setup(server)
        if server.weights and averaged:
            server.update_weights({name: self._take(_GLOBAL.format(name), it) for name, it in server.weights.items()})
        is_complete = bool(self._taken) or not server.has_model
        versions = dict[str, StateVersion]()
        for client in server.clients if own or averaged else ():
            if states is None:
                break
            if client.id not in (there := self.run.records.holdings):
                raise self._refusal(f"it has no client '{client.id}'; {nearest(client.id, there)}")
            name = _CLIENTS.format(client.id) if own else _GLOBAL.format(server.type_of(client))
            if name in self.models or not own:  # who has not taken part yet starts as it would have there
                model = self._take(name, server.global_models.initial(server.type_of(client)))
                states.save(client.id, _START, flatten({"model": model}), None)
                versions[client.id] = _START
        is_lost = own and not averaged and not versions and server.clients
        if not self._taken or is_lost or not is_complete:
            raise self._refusal(f"it has {', '.join(self.models) or 'none'}, and this method starts from others")
        shown = shorten(", ".join(dict.fromkeys(self._taken)), _SHOWN, placeholder=" ...")
        return f"{shown}, after round {self.round} of '{self.run.name}'", versions

    def _take(self, name: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a model, on the device of those in whose place they come; its name is noted."""
        self._taken.append(name)
        if name not in self.models:
            raise self._refusal(f"it lacks {name}; {nearest(name, self.models)}")
        tensors = self.models[name]()
        try:
            require_outline(tensors, outline_of(own))
        except PayloadError as error:
            raise self._refusal(f"{name} differs, {error}") from error
        return {key: value.to(own[key].device) for key, value in tensors.items()}

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"initial: the run cannot start from the models of '{self.run.folder}': {reason}")
