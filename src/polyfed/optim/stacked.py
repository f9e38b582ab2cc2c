"""Optimiser steps of many models at once, whose tensors stand in stacks [k, ...], one row a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from polyfed.optim.adamp import AdamP, advance
from polyfed.optim.state import laid_out_as

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_STEP = "step"
_State = dict[str, Tensor]


class _Run(NamedTuple):
    """Neighbouring rows that are stepped alike."""

    rows: slice
    within: slice
    """Their gradients among those given."""


class StackedOptimizer:
    """Steps rows of stacked parameters as the models' own optimisers would, by the same kernels.

    The state of these becomes rows of stacks as well, so that each can go on by itself at any time.

    Args:
        optimizers: of the models, equal in class, settings and order of parameters.
        stacks: the parameters of all models [k, ...], in that order.
    """

    def __init__(self, optimizers: Sequence[Optimizer], stacks: Sequence[Tensor]) -> None:
        self._optimizers, self._stacks = optimizers, stacks
        self._parameters = [_parameters(optimizer) for optimizer in optimizers]
        self._states = [self._joined(place) for place in range(len(stacks))]

    @staticmethod
    def suits(optimizer: Optimizer) -> bool:
        return type(optimizer) in _KERNELS

    def step(self, rows: Sequence[int], gradients: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        """One step of some rows, ascending.

        Args:
            rows: r of the k models.
            gradients: of each parameter [r, ...]; None leaves it as it is.
            rates: learning rates of the optimisers' groups.
        """
        numbers, places = np.asarray(rows), iter(range(len(gradients)))
        for group, rate in zip(self._optimizers[0].param_groups, rates, strict=True):
            weights, taken, states = list[Tensor](), list[Tensor](), list[_State]()
            for place in islice(places, len(group["params"])):
                if (gradient := gradients[place]) is not None:
                    gradient = gradient.contiguous()  # as the stacks are, which the kernels take for granted
                    for run in self._runs(place, numbers):
                        weights.append(self._stacks[place][run.rows])
                        taken.append(gradient[run.within])
                        states.append(self._advanced(place, run.rows))
            if weights:
                _KERNELS[type(self._optimizers[0])](weights, taken, states, {**group, "lr": rate})

    def release(self, row: int) -> None:
        """Leave a model's optimiser with the state that it would have by itself: none of what was never stepped."""
        state = self._optimizers[row].state
        for parameter, states in zip(self._parameters[row], self._states, strict=True):
            counter = states.get(_STEP, states.get("momentum_buffer"))
            if counter is not None and not bool(counter[row].any()):
                state.pop(parameter, None)
            elif not parameter.is_contiguous():
                state[parameter] = {kind: laid_out_as(parameter, value) for kind, value in state[parameter].items()}

    def _joined(self, place: int) -> _State:
        """The state of a parameter in all models [k, ...], zero where there is none yet; theirs are now its rows."""
        owners = [(one.state, own[place]) for one, own in zip(self._optimizers, self._parameters, strict=True)]
        stacks = _State()
        for kind in _kinds(self._optimizers[0]):
            like = owners[0][1].new_zeros(()) if kind == _STEP else torch.zeros_like(owners[0][1])
            parts = [state[weight][kind] if state.get(weight) else like for state, weight in owners]
            stacks[kind] = torch.stack([part.detach() for part in parts]).contiguous()
        for row, (state, weight) in enumerate(owners):
            if stacks:
                state[weight] = {kind: stack[row] for kind, stack in stacks.items()}
        return stacks

    def _advanced(self, place: int, rows: slice) -> _State:
        """Views of some rows' state; what counts steps is a copy for the kernel to advance, and advanced here."""
        states = self._states[place]
        views = {kind: stack[rows] for kind, stack in states.items()}
        if _STEP in views:
            count = views[_STEP][0].clone()
            views[_STEP] += 1
            views[_STEP] = count
        return views

    def _runs(self, place: int, rows: np.ndarray) -> Iterator[_Run]:
        breaks = np.diff(rows) != 1
        if _STEP in self._states[place]:
            breaks |= np.diff(self._states[place][_STEP].numpy(force=True)[rows]) != 0
        edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(rows)]
        for start, end in pairwise(edges):
            yield _Run(slice(int(rows[start]), int(rows[end - 1]) + 1), slice(start, end))


def clipped_rows(gradients: Sequence[Tensor | None], limit: float | None) -> Sequence[Tensor | None]:
    """The gradients [r, ...], those of each row scaled to a joint norm of at most ``limit``, see ``clip_gradients``."""
    reached = [value for value in gradients if value is not None]
    if limit is None or not reached:
        return gradients
    norms = [torch.linalg.vector_norm(value.flatten(1), dim=1) for value in reached]
    factors = (limit / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
    return [value if value is None else value * factors.reshape(-1, *[1] * (value.ndim - 1)) for value in gradients]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _kinds(optimizer: Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, SGD):
        return ("momentum_buffer",) if any(group["momentum"] for group in optimizer.param_groups) else ()
    return _MOMENTS


# ---- kernels: weights, gradients and states of runs, and settings of their group

_Kernel = Callable[[list[Tensor], list[Tensor], list[_State], dict[str, Any]], None]


@torch.no_grad()
def _sgd(weights: list[Tensor], gradients: list[Tensor], states: list[_State], group: dict[str, Any]) -> None:
    # from zero a buffer becomes the first gradient, as torch starts it
    buffers = [state.get("momentum_buffer") for state in states]
    options = {name: group[name] for name in ("lr", "momentum", "weight_decay", "nesterov", "dampening", "maximize")}
    sgd(weights, gradients, buffers, fused=True, **options)


@torch.no_grad()
def _adam(weights: list[Tensor], gradients: list[Tensor], states: list[_State], group: dict[str, Any]) -> None:
    steps, means, squares = ([state[kind] for state in states] for kind in _MOMENTS)
    options = {name: group[name] for name in ("lr", "weight_decay", "eps", "decoupled_weight_decay")}
    beta1, beta2 = group["betas"]
    adam(
        weights, gradients, means, squares, [], steps, fused=True, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, **options,
    )  # fmt: skip


@torch.no_grad()
def _adamp(weights: list[Tensor], gradients: list[Tensor], states: list[_State], group: dict[str, Any]) -> None:
    advance(weights, gradients, states, group, stacked=True)


_KERNELS: Mapping[type[Optimizer], _Kernel] = {SGD: _sgd, Adam: _adam, AdamW: _adam, AdamP: _adamp}
