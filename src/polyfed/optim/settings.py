"""Settings of optimisers and of learning rates over rounds, and the clipping of gradients."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim import Optimizer

from polyfed.core.errors import PayloadError, nearest
from polyfed.core.settings import Settings, require_default
from polyfed.optim.adamp import AdamP


class OptimizerSettings(Settings):
    """An optimiser and its gradient clipping."""

    kind: Literal["adamp", "adamw", "adam", "sgd"] = Field(default="adamp", description="update rule")
    lr: float = Field(default=2e-4, gt=0, le=100, description="learning rate")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="weight decay; decoupled for adamp and adamw")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum; sgd only")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="decay of both moments; not for sgd")
    eps: float = Field(default=1e-8, gt=0, le=1, description="added to the root of the second moment; not for sgd")
    clip: float | None = Field(default=None, gt=0, description="largest gradient norm; None: no clipping")

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerSettings:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {list(self.betas)}; each must be at least 0 and below 1")
        require_default(self, f"with kind: {self.kind}", *(("betas", "eps") if self.kind == "sgd" else ("momentum",)))
        return self

    def build(self, parameters: Iterable[Tensor] | Iterable[dict[str, Any]]) -> Optimizer:
        """The optimiser over ``parameters``, or groups of them as torch's optimisers take them."""
        parameters = list(parameters)  # type: ignore[assignment]
        if self.kind == "sgd":
            # keys are named as torch's arguments are
            options = self._options("lr", "momentum", "weight_decay")
            return _Descent(parameters, **options, fused=True)
        options = self._options("lr", "betas", "eps", "weight_decay")
        if self.kind == "adamp":
            return AdamP(parameters, **options)
        adaptive = torch.optim.AdamW if self.kind == "adamw" else torch.optim.Adam
        return adaptive(parameters, **options, fused=True)

    def _options(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


_OF_SCHEDULES = {"cosine": ("t_max", "minimum"), "steps": ("milestones", "drop"), "exponential": ("decay", "unit")}
"""Kind of schedule -> settings of it alone."""


class Schedule(Settings):
    """Factor on the learning rate over the rounds."""

    kind: Literal["constant", "cosine", "steps", "exponential"] = Field(default="constant", description="shape")
    t_max: int | None = Field(default=None, ge=1, description="cosine: rounds to the minimum; None: all of the run")
    minimum: float = Field(default=0.0, ge=0, le=1, description="cosine: smallest factor")
    milestones: tuple[float, ...] = Field(
        default=(0.5, 0.8), description="steps: rounds done before each drop; below 1: a fraction of the run"
    )
    drop: float = Field(default=0.1, gt=0, le=1, description="steps: factor of each drop")
    decay: float = Field(default=0.99, gt=0, le=1, description="exponential: factor of each unit")
    unit: Literal["round", "epoch"] = Field(
        default="round", description="exponential: decays after every round, or every local epoch"
    )
    warmup: int = Field(default=0, ge=0, description="rounds of linear warm-up, on top of the shape")

    @model_validator(mode="after")
    def _positive_milestones(self) -> Schedule:
        if not all(milestone > 0 for milestone in self.milestones):
            raise ValueError(f"milestones are {list(self.milestones)}; each must be above 0")
        for name, own in _OF_SCHEDULES.items():
            if name != self.kind:
                require_default(self, f"with kind: {self.kind}", *own)
        return self

    @property
    def spans_run(self) -> bool:
        """True if its rates depend on the number of rounds of the run."""
        fractions = any(milestone < 1 for milestone in self.milestones)
        return self.t_max is None if self.kind == "cosine" else self.kind == "steps" and fractions

    def factor(self, round: int, rounds: int, epoch: int = 0, epochs: int = 1) -> float:
        """Factor on the learning rate in a round, or in an epoch of it.

        cosine: minimum + (1 - minimum)(1 + cos(pi round / t_max)) / 2, and the minimum after t_max; steps:
        drop^(milestones reached), so milestones (0.5, 0.8) of 30 rounds, or (15, 24), mean x0.1 from round
        index 15 and x0.01 from 24; exponential: decay^(rounds done), or decay^(rounds done x
        epochs of a round + epoch).

        Args:
            round: Index from 0, which is the number of rounds done.
            rounds: Number of rounds of the run.
            epoch: Index from 0 of the epoch in its loop; matters to unit ``epoch`` only.
            epochs: Epochs per round, the same for all loops: the local epochs of the method.
        """
        # above 0 in the first round, which would else teach nothing
        warm = min(1.0, (round + 1) / (self.warmup + 1))
        match self.kind:
            case "cosine":
                progress = min(round / (self.t_max or max(rounds, 1)), 1.0)
                return warm * (self.minimum + (1 - self.minimum) * (1 + math.cos(math.pi * progress)) / 2)
            case "steps":
                # fractions are compared with a tolerance: 0.7 x 10 is below 7 in binary
                reached = [round + 1e-9 >= (value * rounds if value < 1 else value) for value in self.milestones]
                return warm * self.drop ** sum(reached)
            case "exponential":
                return warm * self.decay ** (round * epochs + epoch if self.unit == "epoch" else round)
        return warm


class _Descent(torch.optim.SGD):
    """torch's SGD by its fused kernel alone, without records for profilers, which cost a small model more than it."""

    # as torch defines them, see ``AdamP``
    add_param_group = inspect.unwrap(torch.optim.SGD.add_param_group)
    state_dict = inspect.unwrap(torch.optim.SGD.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.SGD.load_state_dict)

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        for group in self.param_groups:
            reached = [value for value in group["params"] if value.grad is not None]
            for dtype in {value.dtype for value in reached}:
                self._descend([value for value in reached if value.dtype == dtype], group)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch leaves it as it is

    def _descend(self, reached: list[Tensor], group: Mapping[str, Any]) -> None:
        """A step of parameters of one type that have a gradient.

        The kernel takes all momenta or none as new. Of parameters that get their first gradient later than others they
        start from zero: that becomes the first gradient, as torch starts it.
        """
        options = {key: group[key] for key in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")}
        new = [value for value in reached if not self.state.get(value)] if group["momentum"] else []
        is_first = len(new) == len(reached)
        self.state.update({value: {"momentum_buffer": torch.zeros_like(value)} for value in new})
        momenta = [self.state[value]["momentum_buffer"] for value in reached] if group["momentum"] else []
        gradients = [value.grad for value in reached if value.grad is not None]
        with torch.set_grad_enabled(False):  # as ``no_grad``, with half of its calls
            torch._fused_sgd_(reached, gradients, momenta, **options, is_first_step=is_first)


def fresh(optimizer: Optimizer) -> Optimizer:
    """A new optimiser of the same parameters with the same options, without state or hooks, as torch unpickles one.

    A constructor takes as long as several steps of a small model.
    """
    groups = [{**group, "params": [*group["params"]]} for group in optimizer.param_groups]
    new = object.__new__(type(optimizer))
    new.__setstate__({"defaults": {**optimizer.defaults}, "state": defaultdict(dict), "param_groups": groups})
    return new


def clip_gradients(parameters: Iterable[Tensor], limit: float | None) -> Tensor | None:
    """Scale all gradients together to a joint L2 norm of at most ``limit``; the norm before, as a tensor.

    With None nothing is done, and None returned.
    """
    return None if limit is None else torch.nn.utils.clip_grad_norm_(parameters, limit)


# ---- state as flat tensors by parameter name, for storage and for swapping clients

_SEPARATOR = ":"  # between part and parameter, as in exp_avg:encoders.image.conv1.weight


def optimizer_tensors(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of the optimiser's momenta and counters, called ``<part>:<parameter>``.

    Parameters that were never updated have none. Learning rates and other settings are not state: who
    restores builds the optimiser from the same settings.

    Raises:
        PayloadError: a state is not a tensor, so could not be stored.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_parameters:
        for part, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise PayloadError(f"state '{part}' of parameter '{name}' is a {type(value).__name__}; use tensors")
            tensors[f"{part}{_SEPARATOR}{name}"] = value.detach().clone()
    return tensors


def load_optimizer_tensors(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]], tensors: Mapping[str, Tensor]
) -> None:
    """Replace the optimiser's whole state by copies of ``tensors``; training then goes on bit for bit.

    Raises:
        PayloadError: a name is not of this optimiser's parameters, or a shape does not fit; nothing is
            changed then.
    """
    by_name = dict(named_parameters)
    loaded: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        part, _, name = key.partition(_SEPARATOR)
        if name not in by_name:
            raise PayloadError(f"state '{part}' belongs to no parameter '{name}' here; {nearest(name, by_name)}")
        if value.ndim and value.shape != by_name[name].shape:
            raise PayloadError(
                f"state '{part}' of parameter '{name}' has shape {tuple(value.shape)}, not "
                f"{tuple(by_name[name].shape)}; restore it into the architecture that it was saved from"
            )
        # with the parameter's strides, which the fused kernels take for granted; stored tensors are contiguous
        copied = torch.empty_like(by_name[name], dtype=value.dtype) if value.ndim else torch.empty_like(value)
        loaded.setdefault(name, {})[part] = copied.detach().copy_(value.detach())
    # a state dict knows parameters by their running number in the groups, not by name
    names = {id(parameter): name for name, parameter in by_name.items()}
    ordered = [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    state["state"] = {index: loaded[name] for index, name in enumerate(ordered) if name in loaded}
    optimizer.load_state_dict(state)
