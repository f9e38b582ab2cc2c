"""AdamP (Heo et al. 2021): Adam that does not grow the norms of scale-invariant weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_SMALLEST_NORM = 1e-30  # keeps quotients by the norm of a zero weight or gradient finite


class AdamP(Optimizer):
    """Adam with the radial part of a step taken out (Heo et al., ICLR 2021, Algorithm 2).

    The Adam step q of a weight of two or more dimensions loses its radial part, Pi_w(q) = q - (w.q / |w|^2)
    w, where the gradient is almost orthogonal to the weight, as it is for weights before a normalisation:
    where max |cos(w, g)| < delta / sqrt(dim w), over the output channels, or else over the whole tensor
    (layer). The weight decay of a projected weight is multiplied by ``wd_ratio``. All tests are tensor
    operations, so a step on a GPU never waits for it.

    >>> weight = torch.nn.Parameter(torch.ones(2, 3))
    >>> optimizer = AdamP([weight], lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
    ) -> None:
        """Set up for ``params``.

        Args:
            params: parameters, or groups of them.
            lr: learning rate.
            betas: decay of the running mean of gradients and of their squares.
            eps: added to the root of the second moment.
            weight_decay: decoupled, multiplied by the learning rate.
            delta: bound of the cosine test; the larger, the more weights count as scale-invariant.
            wd_ratio: share of the weight decay that a projected weight gets.
            nesterov: look ahead by one momentum step.
        """
        moments = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {**moments, "delta": delta, "wd_ratio": wd_ratio})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        update = _adam_update(state, gradient, group)
        decay: float | Tensor = group["lr"] * group["weight_decay"]
        if weight.ndim > 1:
            projected = _project(weight, gradient, update, group["delta"])
            if decay:
                # on the device: to ask it would make every weight wait
                decay = torch.where(projected, decay * group["wd_ratio"], decay)
        if isinstance(decay, Tensor) or decay:
            weight.mul_(1 - decay)
        weight.add_(update, alpha=-group["lr"])


def _adam_update(state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """Advance the moments by a gradient, and give the step of unit learning rate."""
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    beta1, beta2 = map(float, group["betas"])
    state["step"] += 1
    count = float(state["step"])  # kept on the CPU: no wait for a device
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (square / (1 - math.pow(beta2, count))).sqrt_().add_(group["eps"])
    first = mean.lerp(gradient, 1 - beta1) if group["nesterov"] else mean
    return scale.reciprocal_().mul_(first).div_(1 - math.pow(beta1, count))  # in place of the one temporary


def _project(weight: Tensor, gradient: Tensor, update: Tensor, delta: float) -> Tensor:
    """Take the radial part out of ``update`` where the cosine test says so; whether it did, as a tensor.

    Tests and projections follow from norms and dot products a channel, which add up to those of the layer.
    """
    w, g, q = (tensor.reshape(len(weight), -1) for tensor in (weight, gradient, update))
    w_norm, g_norm = torch.linalg.vector_norm(w, dim=1), torch.linalg.vector_norm(g, dim=1)
    wg, wq, ww = torch.linalg.vecdot(w, g), torch.linalg.vecdot(w, q), w_norm.square()
    by_channel = _cosine(wg, w_norm, g_norm).amax() < delta / w.shape[1] ** 0.5
    # only where the channels fail the test, see `radial`
    by_layer = _cosine(wg.sum(), w_norm.norm(), g_norm.norm()) < delta / w.numel() ** 0.5
    layer = (wq.sum() / ww.sum().clamp_min(_SMALLEST_NORM)) * by_layer
    radial = torch.where(by_channel, wq / ww.clamp_min(_SMALLEST_NORM), layer)
    update.addcmul_(weight, radial.reshape(-1, *[1] * (weight.ndim - 1)), value=-1)
    return torch.logical_or(by_channel, by_layer)


def _cosine(wg: Tensor, w_norm: Tensor, g_norm: Tensor) -> Tensor:
    return wg.abs() / (w_norm * g_norm).clamp_min(_SMALLEST_NORM)
