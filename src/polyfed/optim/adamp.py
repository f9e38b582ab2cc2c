"""AdamP (Heo et al. 2021): Adam that does not grow the norms of scale-invariant weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

_SMALLEST_NORM = 1e-30  # keeps quotients by the norm of a zero weight or gradient finite


class AdamP(Optimizer):
    """Adam with the radial part of a step taken out (Heo et al., ICLR 2021, Algorithm 2).

    The Adam step q (torch's fused kernel) of a weight of two or more dimensions loses its radial part, Pi_w(q) = q -
    (w.q / |w|^2) w, where the gradient is almost orthogonal to the weight, as it is for weights before a normalisation:
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
        # fused: by which torch keeps the step counts that it restores on the device of their weights
        super().__init__(params, {**moments, "delta": delta, "wd_ratio": wd_ratio, "fused": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update([weight for weight in group["params"] if weight.grad is not None], group)
        return loss

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        for weight, update in zip(weights, self._adam_updates(weights, group), strict=True):
            decay: float | Tensor = group["lr"] * group["weight_decay"]
            if weight.ndim > 1 and weight.grad is not None:
                projected = _project(weight, weight.grad, update, group["delta"])
                if decay:
                    # on the device: to ask it would make every weight wait
                    decay = torch.where(projected, decay * group["wd_ratio"], decay)
            if isinstance(decay, Tensor) or decay:
                weight.mul_(1 - decay)
            weight.add_(update, alpha=-group["lr"])

    def _adam_updates(self, weights: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Advance the moments by the gradients, and give Adam's steps of unit learning rate."""
        states = [self._state_of(weight) for weight in weights]
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        updates = [torch.zeros_like(weight) for weight in weights]
        (beta1, beta2), eps = map(float, group["betas"]), float(group["eps"])
        # from zero by a rate of -1: what the kernel leaves is the step itself
        rule: dict[str, Any] = {"lr": -1.0, "weight_decay": 0.0, "amsgrad": False, "maximize": False, "fused": True}
        adam(updates, gradients, means, squares, [], steps, beta1=beta1, beta2=beta2, eps=eps, **rule)
        if group["nesterov"]:
            for update, gradient, square, step in zip(updates, gradients, squares, steps, strict=True):
                scale = (square / _correction(beta2, step)).sqrt_().add_(eps)
                ahead = gradient / scale.mul_(_correction(beta1, step))
                update.lerp_(ahead, 1 - beta1)
        return updates

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)  # there, as the kernel counts
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state


def _correction(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step, without the cancellation of the first steps."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


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
