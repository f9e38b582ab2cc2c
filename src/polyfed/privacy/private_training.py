"""DP-SGD: training by clipped gradients of each private sample, noise on their sum, and Poisson sampling.

Source: Abadi et al. (CCS 2016), Algorithm 1; clipping and summing are opacus's (Yousefpour et al. 2021).
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_map

from polyfed.core.errors import ConfigError
from polyfed.core.extras import brought_by
from polyfed.data.samples import Batch, Samples
from polyfed.models.trunks import by_sample
from polyfed.privacy.accounting import EXTRA, PrivacyCost
from polyfed.privacy.release import noisy
from polyfed.privacy.secret import keyed_digest, uniform_draws
from polyfed.privacy.settings import SampleProtection
from polyfed.tasks.task import Task

_log = logging.getLogger(__name__)


class Trained(Protocol):
    """The part of a participant that its training uses."""

    @property
    def name(self) -> str: ...
    @property
    def task(self) -> Task: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def training(self) -> Any: ...
    def trainer(self) -> Any: ...
    def epochs(self, number: int) -> Iterable[int]: ...
    def training_loss(self, batch: Batch) -> Tensor: ...


def training_cost(settings: SampleProtection, samples: int, batch: int, epochs: int, steps: int | None) -> PrivacyCost:
    """Cost of this much training on this many samples; a pass has as many steps as one over batches."""
    number = epochs * math.ceil(samples / batch) if steps is None else steps
    return PrivacyCost(settings.noise_multiplier, min(1.0, batch / samples), number)


def require_per_sample(task: Task, model: nn.Module, who: str) -> None:
    """Check that the loss of a batch is a mean over its samples, and that the model treats each one separately.

    Raises:
        ConfigError: a loss or a layer mixes samples, so that no gradient belongs to one sample.
    """
    if not task.is_per_sample:
        raise ConfigError(
            f"privacy.samples: the loss of {who}'s task '{task.component_name()}' compares samples of a batch, so no "
            "gradient is one sample's; protect the reply (privacy.reply), or choose a task whose loss is a mean"
        )
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    if mixing := [name for name in norms if not {f"{name}.weight", f"{name}.bias"}.isdisjoint(trained)]:
        raise ConfigError(
            f"privacy.samples: '{mixing[0]}' of {who}'s model is a batch norm, which mixes samples; set `norm: group` "
            "(resnet), choose encoders with layer norms or none (blocks, vit, transformer, bag, gru, "
            "projection), or protect the reply"
        )


def opacus_optimizers() -> Any:
    """The module of opacus.

    Raises:
        ConfigError: the package is missing.
    """
    with brought_by(EXTRA):
        return importlib.import_module("opacus.optimizers")


@dataclass
class PrivateTraining:
    """Trains a client within one step of a method.

    Attributes:
        protection: Clipping norm and noise.
        key: Key of this step's draws, from the site's secret.
        cost: Charge of the step; the training takes no more steps than it covers.
        blank: True for blank samples, so that only noise is learnt.
    """

    protection: SampleProtection
    key: bytes
    cost: PrivacyCost
    blank: bool = False
    _done: int = 0

    def fit(self, participant: Trained, samples: Samples, epochs: int, steps: int | None) -> int:
        """Train on the task; returns the number of steps, as ``Participant.fit``.

        Args:
            participant: Participant that trains.
            samples: Its private samples.
            epochs: Passes over them.
            steps: Number of batches in place of epochs.

        Raises:
            ConfigError: the task or the model is not per sample, or the training exceeds the charge.
        """
        require_per_sample(participant.task, participant.model, participant.name)
        asked = training_cost(self.protection, len(samples), participant.training.batch_size, epochs, steps)
        if asked.rate != self.cost.rate or self._done + asked.steps > self.cost.steps:
            raise ConfigError(
                f"privacy.samples accounts for {self.cost.steps} steps of training on the client's own samples per "
                f"round, and the method asks for {self._done + asked.steps}, or for other samples"
            )
        participant.model.train()
        one = PerSampleGradients(participant, participant.trainer(), samples, self.protection)
        for _ in participant.epochs(epochs if steps is None else 1):
            for _ in range(asked.steps // epochs if steps is None else steps):
                self._step(one)
        one.forget()
        return asked.steps

    def _step(self, one: PerSampleGradients) -> None:
        key = keyed_digest(self.key, b"step", self._done.to_bytes(8, "big"))
        self._done += 1
        samples, rate = one.samples, self.cost.rate
        assert rate is not None
        chosen = (uniform_draws(keyed_digest(key, b"batch"), len(samples)) < rate).nonzero().flatten()
        # augmentation and dropout too: the draws of one sample may shift those of the others in its batch
        seed = int.from_bytes(keyed_digest(key, b"draws")[:7], "big")
        torch.manual_seed(seed)
        sums = one.clipped_sums(chosen, torch.Generator().manual_seed(seed))
        deviation = self.protection.noise_multiplier * self.protection.clip
        for number, (parameter, total) in enumerate(sums):
            if self.blank:
                total.zero_()
            # depends on the sum as well: the same step over other data must not have the same noise
            content = hashlib.sha256(total.cpu().numpy().tobytes()).digest()
            own = keyed_digest(key, b"noise", number.to_bytes(8, "big"), content)
            mean = noisy(total.double(), deviation, own) / (rate * len(samples))
            parameter.grad = mean.to(parameter.dtype)
        one.trainer.apply()


class PerSampleGradients:
    """Gradients of single samples, clipped and summed."""

    def __init__(self, participant: Trained, trainer: Any, samples: Samples, protection: SampleProtection) -> None:
        self.participant, self.trainer, self.samples = participant, trainer, samples
        self._module = _LossModule(participant)
        self._optimizer = opacus_optimizers().DPOptimizer(
            trainer.optimizer,
            noise_multiplier=0.0,  # noise comes from the site's secret
            max_grad_norm=protection.clip,
            expected_batch_size=None,
            loss_reduction="sum",
        )
        names = [f"model.{name}" for name in trainer.names]
        tensors = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        self._trained = {name: tensors[name] for name in names}
        self._fixed = {name: value for name, value in tensors.items() if name not in self._trained}

    def clipped_sums(self, index: Tensor, stream: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters with the sums of their samples' gradients, each of norm ``clip`` at most over all parameters."""
        self.forget()
        gradients = finite_gradients(self._gradients(index, stream))
        for name, parameter in self._trained.items():
            parameter.grad_sample = gradients[name]  # type: ignore[attr-defined]
        self._optimizer.clip_and_accumulate()
        return ((parameter, parameter.summed_grad) for parameter in self._trained.values())  # type: ignore[attr-defined]

    def _gradients(self, index: Tensor, stream: torch.Generator) -> dict[str, Tensor]:
        """Gradients of each sample, [b, ...]; 0 for an unreadable or failing sample, which must not be noticeable.

        Raises:
            Exception: blank samples fail as well.
        """
        zeros = {name: value.new_zeros(len(index), *value.shape) for name, value in self._trained.items()}
        if not len(index):  # an empty batch has only noise
            return zeros
        try:
            return self._of(self.samples.batch(index, stream))
        except Exception:
            self._of(self.samples.blank().batch(index[:1]))
            if len(index) == 1:
                _log.exception("a sample of %s counts for nothing in this step", self.participant.name)
                return zeros
        alone = [self._gradients(one, stream) for one in torch.split(index, 1)]
        return {name: torch.cat([gradients[name] for gradients in alone]) for name in zeros}

    def _of(self, batch: Batch) -> dict[str, Tensor]:
        if not batch.present:
            return self._alike(batch)
        # the computation may not depend on the data of one sample: samples that lack the same are taken together
        masks = torch.stack([*batch.present.values()])
        parts = [(masks == pattern[:, None]).all(0).nonzero()[:, 0] for pattern in torch.unique(masks, dim=1).T]
        gradients = [self._of_pattern(_without_gaps(batch, part), len(part)) for part in parts]
        order = torch.cat(parts).argsort()
        return {name: torch.cat([one[name] for one in gradients])[order] for name in gradients[0]}

    def _of_pattern(self, batch: Batch, count: int) -> dict[str, Tensor]:
        """Gradients of samples that lack the same modalities; 0 where the task cannot use the others."""
        if batch.inputs and len(self.participant.task.usable(batch)):
            return self._alike(batch)
        return {name: value.new_zeros(count, *value.shape) for name, value in self._trained.items()}

    def _alike(self, batch: Batch) -> dict[str, Tensor]:
        content = dict(vars(batch.to(self.participant.device)))
        with by_sample(self._module):
            gradients: dict[str, Tensor] = vmap(grad(self._loss), in_dims=(None, 0), randomness="different")(
                {name: value.detach() for name, value in self._trained.items()}, content
            )
        return gradients

    def _loss(self, weights: dict[str, Tensor], one: dict[str, Any]) -> Tensor:
        alone = tree_map(lambda value: value[None], one)
        loss: Tensor = functional_call(self._module, {**self._fixed, **weights}, (alone,))
        return loss

    def forget(self) -> None:
        """Remove all values of single samples from the parameters, which serve the next client."""
        self._optimizer.zero_grad(set_to_none=True)


def _without_gaps(batch: Batch, index: Tensor) -> Batch:
    """The samples at ``index``, which lack the same modalities, with the inputs that they have."""
    chosen = batch.each(lambda column: column[index])
    lacking = [name for name, mask in chosen.present.items() if not bool(mask.any())]
    return replace(chosen, inputs={name: x for name, x in chosen.inputs.items() if name not in lacking}, present={})


class _LossModule(nn.Module):
    """Loss of a participant's model, called with the fields of a batch."""

    def __init__(self, participant: Trained) -> None:
        super().__init__()
        self.participant, self.model = participant, participant.model

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        return self.participant.training_loss(Batch(**batch))


def finite_gradients(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients, with 0 for samples that have an entry which is not finite: clipping would make all NaN."""
    sound = torch.stack([value.isfinite().unsqueeze(-1).flatten(1).all(1) for value in gradients.values()]).all(0)
    if bool(sound.all()):
        return gradients
    for value in gradients.values():
        value[~sound] = 0.0
    return gradients
