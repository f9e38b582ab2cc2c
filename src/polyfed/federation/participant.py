"""Base of server and clients: a model, a task, data, and methods to train and to represent."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Literal, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from polyfed.core.activity import SERVER, passed
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.data.samples import Batch, Samples
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Clock, Correction, Epoch, Optimizers, Regulariser, Trainer
from polyfed.models.model import CachedModel, Embedder, Model
from polyfed.tasks.task import Task

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_AHEAD = 1 << 20  # bytes of a batch that is kept for all epochs


Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TrainingSetup:
    """Task of a participant, and its training.

    Attributes:
        task: task of the participant, if it has one.
        head_name: name of the task's head in ``model.heads``.
        settings: optimiser, schedule and batch size.
        precision: autocast type of forward passes.
        evaluation_batch: samples per batch when no gradient is needed.
    """

    task: Task | None = None
    head_name: str = ""
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    precision: Precision = "float32"
    evaluation_batch: int = 256


@dataclass(frozen=True)
class PublicSamples:
    """The public set in a participant's own views.

    Attributes:
        pairs: samples of the set, if the federation has one.
        parts: public samples other than the pairs, each of one modality, by output; see ``PublicSet.parts``.
        order: digest of the set and its order; empty where that does not matter.
    """

    pairs: Samples | None = None
    parts: Mapping[str, Samples] = field(default_factory=dict)
    order: str = ""


@dataclass(kw_only=True)
class Participant:
    """A server or a client while it works in a round.

    Attributes:
        name: ``server`` or the client id; part of every random stream.
        load_model: builds the model on its device, with the given weights, or else with the participant's own.
        clock: seed and round.
        setup: task and training of the participant.
        public: the public set in the participant's own views.
        optimizers: optimisers and their states.
    """

    name: str
    load_model: Callable[[Mapping[str, Tensor] | None], Model]
    clock: Clock
    setup: TrainingSetup = field(default_factory=TrainingSetup)
    public: PublicSamples = field(default_factory=PublicSamples)
    optimizers: Optimizers = field(default_factory=Optimizers)
    _model: Model | None = None
    _ready_in: int = -1
    _exchanged: tuple[tuple[int, int], Samples | None] = ((0, 0), None)

    @property
    def model(self) -> Model:
        """The participant's model; with initial weights if it has neither kept nor received any."""
        if self._model is None:
            self._model = self.load_model(None)
        return self._model

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the weights of the whole model; initial or kept ones are not even loaded."""
        self._model = self.load_model(weights)

    @cached_property  # a model walks through its modules to find it
    def device(self) -> torch.device:
        return self.model.device

    @property
    def task(self) -> Task:
        """Task that the model is trained for."""
        if self.setup.task is None:
            raise ConfigError(f"the {self.name} has no task; the method needs a '{self.name}' section")
        return self.setup.task

    @property
    def training(self) -> TrainingSettings:
        """Optimiser, schedule and batch size."""
        return self.setup.settings

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities that the model encodes of samples; it may also encode names of classes."""
        own = frozenset[str]() if self.setup.task is None else self.setup.task.own_modalities
        return tuple(name for name in self.model.modalities if name not in own)

    @property
    def head(self) -> nn.Module | None:
        return self.model.heads._modules.get(self.setup.head_name)

    @property
    def public_set(self) -> Samples:
        """The public set; raises if the federation has none."""
        if self.public.pairs is None:
            needed = "a 'public' section" + (" and a 'server' section" if self.name == SERVER else "")
            raise ConfigError(f"{self.name} has no public set; add {needed}")
        return self.public.pairs

    def generator(self, purpose: str) -> torch.Generator:
        # one stream a purpose: what one draws must not depend on whether another did, nor on what is kept
        return generator(self.clock.seed, self.clock.round, self.name, purpose)

    def trainer(
        self,
        name: str = "optimizer",
        training: TrainingSettings | None = None,
        only: Callable[[str], bool] | None = None,
        module: nn.Module | None = None,
    ) -> Trainer:
        """The optimiser called ``name``, continued from its kept state if there is one; the same within a step.

        It trains the parameters of ``module`` (None: the model) whose names ``only`` holds to be its own; None: all.
        """
        trainers, states, epochs = self.optimizers.trainers, self.optimizers.states, self.optimizers.epochs
        if name not in trainers:
            trainers[name] = Trainer(module or self.model, training or self.training, self.clock, epochs, only)
            if name in states:
                trainers[name].load(states[name])
        return trainers[name]

    def epochs(self, number: int) -> Iterator[int]:
        """The epochs of a training loop, from 0; only within one do trainers step, at their rates for this epoch."""
        return self.optimizers.epochs.through(number)

    def warn_if_idle(self, warned: set[str]) -> None:
        """Warn once per run if its optimisers made no step in the round."""
        trainers = self.optimizers.trainers.values()
        if trainers and not any(trainer.steps for trainer in trainers) and self.name not in warned:
            warned.add(self.name)
            what = "%s made no step of its optimiser in round %d: no batch of it can be learnt from; give it more data"
            _log.warning(what, self.name, self.clock.round)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The precision of forward passes; losses are computed in fp32 by themselves."""
        if self.setup.precision == "float32":
            return contextlib.nullcontext()
        # bfloat16 has the range of fp32, so losses need no scaling
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def batches(self, samples: Samples, purpose: str, size: int | None = None) -> Iterator[Batch]:
        """One shuffled pass in the training view, on the device.

        A last batch of one sample is left out, as is a modality that only one sample of a batch has: neither batch
        statistics nor a contrast are defined on it.
        """
        device, size = self.device, size or self.training.batch_size
        shuffled = samples.batches(size, self.generator(purpose))
        for batch in self._reported(shuffled, purpose, math.ceil(len(samples) / size)):
            if len(batch) > 1:
                batch = batch.without_lone()
                # ``to`` would look at every tensor of the batch
                yield batch if device.type == "cpu" else batch.to(device)

    def _passes(self, samples: Samples, purpose: str, epochs: int) -> Callable[[int], Iterable[Batch]]:
        """Function that returns the batches of an epoch; the inputs of a small client are read only once."""
        n, names = len(samples), [f"{purpose}-{epoch}" for epoch in range(epochs)]
        if epochs < 2 or not 1 < n <= self.training.batch_size or n * samples.still_bytes > _AHEAD:
            return lambda epoch: self.batches(samples, f"{purpose}-{epoch}")
        every = samples.batch(torch.arange(n)).to(self.device)
        orders = torch.stack([torch.randperm(n, generator=self.generator(name)) for name in names]).to(self.device)

        def batches(epoch: int) -> Iterable[Batch]:
            batch = every.each(partial(torch.index_select, dim=0, index=orders[epoch]))
            return self._reported((batch.without_lone(),), names[epoch], 1)

        return batches

    def _reported(self, batches: Iterable[_T], purpose: str, a_pass: int) -> Iterator[_T]:
        epoch, epochs = self.optimizers.epochs.current or Epoch(0, 1)
        return passed(self.name, _unnumbered(purpose), batches, epochs * a_pass, before=epoch * a_pass)

    def exchanged_index(self, count: int | None = None) -> Tensor:
        """Which public samples are exchanged in this round, ascending: all, or ``count`` of them, drawn anew each round
        and by all participants alike, so that no index need cross."""
        total = len(self.public_set)
        if count is None or count >= total:
            return torch.arange(total)
        # no participant's name among the parts: all draw the same
        order = torch.randperm(total, generator=generator(self.clock.seed, self.clock.round, "exchanged"))
        return order[:count].sort().values

    def exchanged(self, count: int | None = None) -> Samples:
        """The public samples that participants exchange in this round, in public order."""
        if count is None or count >= len(self.public_set):
            return self.public_set
        if self._exchanged[0] != (self.clock.round, count):  # once per round, not for every reply
            self._exchanged = (self.clock.round, count), self.public_set.subset(self.exchanged_index(count))
        assert self._exchanged[1] is not None
        return self._exchanged[1]

    def public_batches(
        self,
        purpose: str,
        size: int,
        *,
        augment: bool = False,
        samples: Samples | None = None,
        wanted: int | None = None,
    ) -> Iterator[Batch]:
        """One shuffled pass over public samples (None: all), or its first ``wanted`` batches, in the evaluation view
        unless ``augment``; no batch of one sample."""
        chosen, stream = samples or self.public_set, self.generator(purpose)
        order = torch.randperm(len(chosen), generator=stream)
        parts = torch.split(order, size)[:wanted]
        batches = chosen.batches_of(parts, stream if augment else None)
        for batch in self._reported(batches, purpose, len(parts)):
            if len(batch) > 1:
                yield batch.to(self.device)

    def task_loss(self, batch: Batch, model: Embedder | None = None) -> Tensor:
        """The participant's own objective on a batch; ``model`` embeds it where other losses share that."""
        self.prepare_task()
        with self.autocast():
            return self.task.loss(model or self.model, self.head, batch)

    def training_loss(self, batch: Batch, task_weight: float = 1.0, regulariser: Regulariser | None = None) -> Tensor:
        """The scalar ``task_weight`` * task loss + regulariser of a batch; a weight of 0 leaves the task out."""
        self.prepare_task()
        shared, losses = CachedModel(self.model), []
        with self.autocast():
            if task_weight:
                loss = self.task.loss(shared, self.head, batch)
                losses.append(loss if task_weight == 1 else task_weight * loss)
            if regulariser is not None:
                losses.append(regulariser(shared, batch))  # what the task has embedded is not embedded again
        return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0])

    def prepare_task(self, *, to_train: bool = True) -> None:
        """Prepare the task for the model's weights: once per round for training, and anew for each evaluation."""
        if not to_train or self._ready_in != self.clock.round:
            with self.autocast():
                self.task.prepare(self.model, self.head, self.public.pairs, self.setup.evaluation_batch)
        # training never uses what an evaluation prepared
        self._ready_in = self.clock.round if to_train else -1

    def fit(
        self,
        samples: Samples,
        *,
        epochs: int,
        steps: int | None = None,
        purpose: str = "task",
        task_weight: float = 1.0,
        regulariser: Regulariser | None = None,
        correct: Correction | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> int:
        """Train on the task, and on what a method adds to it.

        Args:
            samples: training samples.
            epochs: passes over them.
            steps: so many batches instead, in as many passes as that takes; a schedule by epochs counts them as one.
            purpose: names the random stream.
            task_weight: factor of the task's loss; with 0 it is not even computed.
            regulariser: gives a loss to add, from the model (which embeds a batch only once) and the batch.
            correct: changes gradients before each step, as ``Trainer.step``.
            after_step: called after each step.

        Returns:
            Number of optimiser steps; 0 without a loss to train on.
        """
        if not (epochs if steps is None else steps) or (not task_weight and regulariser is None):
            return 0
        self.model.train()
        trainer, done = self.trainer(), 0
        passes = self._passes(samples, purpose, 1 if steps is not None else epochs)
        for epoch in self.epochs(epochs) if steps is None else self.optimizers.epochs.as_one():
            before = done
            wanted = None if steps is None else steps - done
            for batch in islice(passes(epoch), wanted):
                loss = self.training_loss(batch, task_weight, regulariser)
                if not loss.requires_grad:  # all samples lack the only modality whose encoder is trained
                    continue
                trainer.step(loss, correct)
                after_step()
                done += 1
            if done in (steps, before):  # all wanted batches are done, or the pass has none
                break
        return done

    @torch.no_grad()
    def represent(
        self, samples: Samples, modalities: Sequence[str] | None = None, *, training: bool = False
    ) -> dict[str, Tensor]:
        """Representations [n, d] of samples by modality, on the device.

        Evaluation mode and view, so it is deterministic and leaves buffers alone, and each distinct row is encoded
        once; ``training`` asks for training mode and view instead, as CreamFL's released code does.
        """
        names = [name for name in modalities or samples.modalities if name in self.modalities]
        was_training = self.model.training
        self.model.train(training)
        try:
            pairs = {name: self.represent_distinct(samples, name, training=training) for name in names}
        finally:
            self.model.train(was_training)  # a method may ask in the middle of its training
        return {name: values[inverse_index] for name, (values, inverse_index) in pairs.items()}

    @torch.no_grad()
    def represent_distinct(
        self, samples: Samples, modality: str, *, training: bool = False
    ) -> tuple[Tensor, Int64[Tensor, " n"]]:
        """Representations [k, d] of the distinct inputs among samples, and the place of each sample among them.

        In the mode that the model is in, and the evaluation view; with ``training`` the training view of every sample.
        """
        stream = self.generator(f"represent-{modality}") if training else None
        # every sample is augmented in its own way
        each_apart = samples.rows[modality], torch.arange(len(samples))
        rows, inverse_index = each_apart if training else samples.distinct(modality)
        parts, chunks = [], torch.split(rows, self.setup.evaluation_batch)
        loaded = samples.loads(modality, chunks, stream)
        for inputs in passed(self.name, f"encoding {modality}", loaded, len(chunks)):
            with self.autocast():
                parts.append(self.model.represent(modality, inputs.to(self.device)))
        return torch.cat(parts), inverse_index.to(self.device)

    def evaluate(self, samples: Samples) -> dict[str, float]:
        """The task's metrics on samples."""
        self.prepare_task(to_train=False)
        with self.autocast():
            return self.task.evaluate(self.model, self.head, samples, batch_size=self.setup.evaluation_batch)


@lru_cache  # every pass of every client asks
def _unnumbered(purpose: str) -> str:
    return re.sub(r"(-\d+)+$", "", purpose)
