"""Models of equal architecture that are trained together: their tensors stand in stacks [k, ...], one row a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from polyfed.core.randomness import global_states, set_global_states
from polyfed.data.samples import Batch, Inputs
from polyfed.federation.fitting import Fitting
from polyfed.optim.stacked import StackedOptimizer, clipped_rows


@dataclass(eq=False)
class PendingStep:
    """A step that a client is about to take.

    Attributes:
        fit: its training.
        batch: the batch.
        random: what torch's global generators are at in the client's step.
    """

    fit: Fitting
    batch: Batch
    random: list[Tensor] = field(default_factory=global_states)


class TrainingModule(nn.Module):
    """All that a client's training reads and changes, as one module."""

    def __init__(self, fit: Fitting) -> None:
        super().__init__()
        self.fit = fit
        self.model = fit.participant.model
        self.regulariser = fit.regulariser if isinstance(fit.regulariser, nn.Module) else None
        self.correct = fit.correct if isinstance(fit.correct, nn.Module) else None

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a batch, as its fields."""
        return self.fit.loss(Batch(**batch))


class Stack:
    """Clients in training whose own tensors are rows of stacks, so that each may also step by itself at any time.

    Args:
        parts: of clients whose training is of one kind, see ``packing.kind_of``.
    """

    def __init__(self, parts: Sequence[TrainingModule]) -> None:
        # who has most batches comes first: those that still have full ones are then the first rows, which are a view
        self._parts = sorted(parts, key=lambda one: len(one.fit.samples), reverse=True)
        self._row = {one.fit: row for row, one in enumerate(self._parts)}
        self._tensors = [one.tensors for one in self._parts]
        first, trainers = self._tensors[0], [one.fit.trainer for one in self._parts]
        self._trained = [f"model.{name}" for name in trainers[0].names]
        owned = _owned(self._tensors)
        self._strides = {name: first[name].stride() for name in owned}
        self._stacks = _as_rows(self._tensors, owned)
        weights = [self._stacks[name] for name in self._trained]
        self._optimizer = StackedOptimizer([trainer.optimizer for trainer in trainers], weights)
        self._changing = [name for name, _ in self._parts[0].named_buffers() if name in self._stacks]

    def step(self, steps: Sequence[PendingStep]) -> None:
        """Take a step of each of some clients on batches of equal size; if it raises, nothing has happened.

        Raises:
            Exception: whatever computing the losses of all at once raises.
        """
        steps = sorted(steps, key=lambda step: self._row[step.fit])
        rows = [self._row[step.fit] for step in steps]
        template = self._parts[rows[0]]  # of a client that is in training, as its mode says
        is_prefix = rows[-1] < len(rows)
        at = slice(len(rows)) if is_prefix else torch.tensor(rows, device=template.fit.participant.device)
        weights, values = self._at(at)
        losses, states = _losses(template, steps, weights, values)
        gradients = torch.autograd.grad(losses.sum(), list(weights.values()), allow_unused=True)
        with torch.no_grad():
            if not is_prefix:  # a loss may have kept weights within their range
                self._write(at, weights)
            corrected = _corrected(template, dict(zip(self._trained, gradients, strict=True)), weights, values)
            trainer = template.fit.trainer
            self._optimizer.step(rows, clipped_rows(corrected, trainer.training.optimizer.clip), trainer.rates)
            self._write(at, {name: value for name, value in values.items() if not is_prefix or name in self._changing})
        # a correction comes last, and so need not be undone once it is known to work
        self._changing = [name for name in self._changing if not name.startswith("correct.")]
        for step, state in zip(steps, states, strict=True):
            step.random = state

    def leave(self, fit: Fitting) -> None:
        row = self._row[fit]
        for name, stride in self._strides.items():
            tensor = self._tensors[row][name]
            own = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
            tensor.data = own.copy_(tensor.data)
        self._optimizer.release(row)

    def _at(self, at: slice | Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        values = {name: stack[at] for name, stack in self._stacks.items()}
        if isinstance(at, slice):  # views: a loss that raises must leave no traces
            values |= {name: values[name].clone() for name in self._changing}
        return {name: values.pop(name).detach().requires_grad_() for name in self._trained}, values

    def _write(self, at: slice | Tensor, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._stacks[name][at] = value


def _as_rows(owners: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> dict[str, Tensor]:
    """The named tensors of all as stacks [k, ...], of which they are rows from now on."""
    stacks = {}
    for name in names:
        # contiguous: kernels take stacks and gradients to be laid out alike, and stacks of images' filters may not be
        stacks[name] = torch.stack([own[name].detach() for own in owners]).contiguous()
        for row, own in zip(stacks[name], owners, strict=True):
            own[name].data = row
    return stacks


def _losses(
    template: TrainingModule, steps: Sequence[PendingStep], weights: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> tuple[Tensor, list[list[Tensor]]]:
    """The loss of each step [r], and what the clients' generators are at after it."""

    def loss(weights: Mapping[str, Tensor], values: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Any:
        return functional_call(template, {**values, **weights}, (batch,))

    batches, padded = joined(steps)
    with OwnDropout([step.random for step in steps], by_position=not padded) as dropout:
        losses: Tensor = torch.vmap(loss, (0, 0, 0), randomness="error")(weights, values, batches)
    return losses, dropout.states


def _owned(owners: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Names of tensors that are not one and the same for all, as what they received may be."""
    return [name for name, tensor in owners[0].items() if any(own[name] is not tensor for own in owners)]


def _corrected(
    parts: TrainingModule,
    gradients: Mapping[str, Tensor | None],
    weights: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
) -> list[Tensor | None]:
    """The gradients, which ``parts.correct`` changes if there is one."""
    if (correct := parts.correct) is None:
        return list(gradients.values())
    own = {name.removeprefix("correct."): value for name, value in values.items() if name.startswith("correct.")}
    reached = {name.removeprefix("model."): value for name, value in gradients.items() if value is not None}
    # its own, as parameters whose sum a loss takes may share a gradient
    reached = {name: value.clone() for name, value in reached.items()}
    live = {name: weights[f"model.{name}"].detach() for name in reached}

    def change(own: dict[str, Tensor], reached: dict[str, Tensor], live: dict[str, Tensor]) -> dict[str, Tensor]:
        functional_call(correct, own, (reached, live))
        return reached

    changed = torch.vmap(change)(own, reached, live)
    return [changed.get(name.removeprefix("model.")) for name in gradients]


def joined(steps: Sequence[PendingStep]) -> tuple[dict[str, Any], bool]:
    """The fields of the steps' batches, stacked, and whether inputs of one had to be padded to the width of others."""
    batches, opened, padded = [step.batch for step in steps], steps[0].fit.samples.inputs, False
    inputs = {name: [batch.inputs[name] for batch in batches] for name in opened}
    for name, values in inputs.items():
        if _differ(values):
            padded, inputs[name] = True, _padded(values, pad_of(opened[name]))
    targets = {name: [batch.targets[name] for batch in batches] for name in batches[0].targets}
    numbers = {name: [getattr(batch, name) for batch in batches] for name in ("index", "items", "matches")}
    return {"inputs": _each_stacked(inputs), "targets": _each_stacked(targets), **_each_stacked(numbers)}, padded


def _differ(values: Sequence[Tensor]) -> bool:
    return any(value.shape != values[0].shape for value in values)


def _padded(values: Sequence[Tensor], fill: float | None) -> list[Tensor]:
    widest = max(value.shape[1] for value in values)
    return [F.pad(value, (0, widest - value.shape[1]), value=fill) for value in values]


def _each_stacked(values: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack(tensors) for name, tensors in values.items()}


def pad_of(inputs: Inputs) -> float | None:
    """What fills inputs up whose width differs from batch to batch; None: it does not."""
    return getattr(inputs, "pad", None)


class PaddedDrawsError(Exception):
    """A model draws at random for each position, and so for the padding that only the batches of others need."""


class OwnDropout(TorchFunctionMode):
    """Within it dropout in a ``vmap`` over clients draws for each what it would draw by itself.

    Args:
        states: what torch's global generators are at, of each client.
        by_position: whether more may be dropped than whole features of samples, see ``PaddedDrawsError``.
    """

    def __init__(self, states: Sequence[list[Tensor]], *, by_position: bool = True) -> None:
        super().__init__()
        self.states, self._by_position = list(states), by_position

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        if func is Tensor.contiguous:  # in whatever layout, which ``vmap`` cannot tell
            return args[0].contiguous()
        return func(*args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        if input.ndim > 2 and not self._by_position:
            raise PaddedDrawsError
        result: Tensor = _Masked.apply(input, p, self._masks)  # type: ignore[no-untyped-call]
        return result

    def _masks(self, like: Tensor, p: float) -> Tensor:
        """One mask a client, by its own generators; ``like`` is [k, ...]."""
        before, masks = global_states(), []
        try:
            for row, states in enumerate(self.states):
                set_global_states(states)
                masks.append(F.dropout(torch.ones_like(like[row]), p))
                self.states[row] = global_states()
        finally:
            set_global_states(before)
        return torch.stack(masks)


_Masks = Callable[[Tensor, float], Tensor]


class _Masked(torch.autograd.Function):
    """Multiplies by masks that are drawn for all rows of a ``vmap`` at once."""

    @staticmethod
    def forward(input: Tensor, p: float, masks: _Masks) -> Tensor:
        raise RuntimeError("dropout of something that is not of one client alone")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: ``vmap`` computes by differentiable operations."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], input: Tensor, p: float, masks: _Masks) -> tuple[Tensor, int]:
        """Rows of ``input`` times their masks."""
        rows = input.movedim(in_dims[0], 0)
        return rows * masks(rows, p), 0
