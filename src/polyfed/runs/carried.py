"""Runs that build on others: more rounds of the same run, and a run that starts from the models of another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
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
_START: StateVersion = (0, 0)  # version of the states that clients have before their first step


def lengthened(run: Run, rounds: int) -> tuple[Experiment, str]:
    """The experiment of a run with another number of rounds, and its ``config.yaml``.

    Raises:
        ConfigError: as many rounds are complete, or with this number they would have been others.
    """
    before, done = run.experiment, run.newest_checkpoint.round if run.newest_checkpoint else 0
    if rounds <= done:
        raise ConfigError(f"rounds: {rounds}, but '{run.folder}' has {done} complete rounds; give more than {done}")
    longer, config = run.with_rounds(rounds)
    for obstacle in _bound_to_rounds(before, longer) if rounds != before.run.rounds else ():
        raise ConfigError(
            f"rounds: {rounds}, but the run was begun for {before.run.rounds}: {obstacle}; begin a new run with "
            f"polyfed run {run.folder / 'config.yaml'} --rounds {rounds}"
        )
    if done == before.run.rounds and done % before.run.eval_every:
        text = "run.eval_every is %d: round %d was evaluated as the last one, and its figures stay"
        log.warning(text, before.run.eval_every, done)
    return longer, config


def _bound_to_rounds(before: Experiment, longer: Experiment) -> Iterator[str]:
    """Settings by which complete rounds depend on the number of rounds, each with its reason."""
    if before.run.engine.is_deployed:
        yield "run.engine: the sites have agreed to that number"
    if before.aggregation.secure is not None:
        yield "aggregation.secure: the keys of the masks are made for that number"
    if before.policy.privacy != longer.policy.privacy:
        yield "privacy.budget.epsilon: the noise is calibrated to that number"
    for path, schedule in schedules_in(before):
        if schedule.spans_run:
            yield f"{path}: '{schedule.kind}' spreads over all rounds (--from starts a run from these models)"


def with_round(experiment: Experiment) -> Experiment:
    """The experiment, whose initial models, if they are another run's, name the round."""
    if experiment.initial is None:
        return experiment
    carried = CarriedModels.of(experiment.initial)
    named = {"round": carried.checkpoint.round, "salt": carried.run.files.salt}
    return experiment.model_copy(update={"initial": experiment.initial.model_copy(update=named)})


@dataclass(frozen=True)
class CarriedModels:
    """The models of a run after one of its rounds.

    Attributes:
        run: The run.
        checkpoint: Its checkpoint of the round.
    """

    run: Run
    checkpoint: Checkpoint

    @classmethod
    def of(cls, settings: InitialModels) -> Self:
        """The models that settings name.

        Raises:
            ConfigError: The run has no checkpoint of the round.
            RunError: It is not a run folder, or its configuration was edited.
        """

        def other(checkpoint: Checkpoint) -> str:
            return "" if settings.round in (None, checkpoint.round) else f"round {checkpoint.round}"

        run = open_run(settings.run)
        checkpoint, others = run.files.newest_checkpoint(other)
        if checkpoint is None:
            wanted = "any round" if settings.round is None else f"round {settings.round}"
            raise ConfigError(f"initial: '{run.folder}' has no checkpoint of {wanted}; it has: {', '.join(others)}")
        return cls(run, checkpoint)

    @cached_property
    def _groups(self) -> Mapping[str, Mapping[str, Tensor]]:
        return unflatten(self.checkpoint.tensors)

    @cached_property
    def _global_models(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {name.removeprefix("weights:"): own for name, own in self._groups.items() if name.startswith("weights:")}

    @cached_property
    def _client_models(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Models that clients keep, by client."""
        states = StateStore(self.run.folder / "checkpoints" / "clients")
        accepted = accepted_in(self.checkpoint.facts).items()
        kept = {client: unflatten(states.load(client, last)) for client, last in accepted if states.versions(client)}
        return {client: groups["model"] for client, groups in kept.items() if "model" in groups}

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
        taken, own = list[str](), dict[str, Mapping[str, Tensor]]()
        if server.has_model and "model" in self._groups:
            server.load_weights(self._fitting("the server's model", self._groups["model"], server.model.exchanged()))
            taken.append("the server's model")
        setup(server)
        if server.weights and self._global_models:
            server.update_weights({name: self._global(name, own) for name, own in server.weights.items()})
            taken.append(f"the global models of {', '.join(server.weights)}")
        elif server.has_model and not taken:
            raise self._refusal("it has no model of the server")
        if states is not None:
            own = self._own_models(server)
            taken += [f"the models of {len(own)} clients"] if own else []
            for client, model in own.items():
                states.save(client, _START, flatten({"model": model}), None)
        elif self._client_models and not self._global_models and server.clients:
            raise self._refusal("its clients have models of their own, which this method does not keep")
        if not taken:
            raise self._refusal("it has no models that this run has")
        return f"{' and '.join(taken)}, after round {self.checkpoint.round} of '{self.run.name}'", dict.fromkeys(
            own, _START
        )

    def _own_models(self, server: Server) -> dict[str, Mapping[str, Tensor]]:
        """Client -> its model; without clients that had none yet, which start as they would have there."""
        models, there = dict[str, Mapping[str, Tensor]](), self.run.records.holdings
        for client in server.clients if self._client_models or self._global_models else ():
            if client.id not in there:
                raise self._refusal(f"it has no client '{client.id}'; {nearest(client.id, there)}")
            own = server.global_models.initial(name := server.type_of(client))
            if not self._client_models:
                models[client.id] = self._global(name, own)
            elif (model := self._client_models.get(client.id)) is not None:
                models[client.id] = self._fitting(f"the model of '{client.id}'", model, own)
        return models

    def _global(self, name: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if name not in self._global_models:
            raise self._refusal(f"it has no global model of '{name}'; {nearest(name, self._global_models)}")
        return self._fitting(f"the global model of '{name}'", self._global_models[name], own)

    def _fitting(self, what: str, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a model, on the device of those in whose place they come."""
        try:
            require_outline(tensors, outline_of(own))
        except PayloadError as error:
            raise self._refusal(f"{what} differs, {error}") from error
        return {name: value.to(own[name].device) for name, value in tensors.items()}

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"initial: the run cannot start from the models of '{self.run.folder}': {reason}")
