"""AdamP (Heo et al. 2021): Adam that does not grow the norms of scale-invariant weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

_SMALLEST_NORM = 1e-30  # keeps quotients by the norm of a zero weight or gradient finite
_CACHED = 1 << 17  # elements


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

    # as torch defines them: it wraps them to keep its compiler from tracing them, and imports that for over a second
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)

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
        """
        moments = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        # ``fused``: torch then restores counters onto the device, where its kernel wants them
        super().__init__(params, {**moments, "delta": delta, "wd_ratio": wd_ratio, "fused": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._update(weights, group)
        return loss

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        updates = _adam_updates([self._state_of(weight) for weight in weights], gradients, group)
        decay: float = group["lr"] * group["weight_decay"]
        for weight, gradient, update in zip(weights, gradients, updates, strict=True):
            share: float | Tensor = decay
            if weight.ndim > 1:
                radial, projected = _radial(weight, gradient, update, group["delta"])
                update.addcmul_(weight, radial.reshape(-1, *[1] * (weight.ndim - 1)), value=-1)
                if decay:
                    # on the device: to ask it would make every weight wait
                    share = torch.where(projected, decay * group["wd_ratio"], decay)
            if decay:
                weight.mul_(1 - share)
        torch._foreach_add_(weights, updates, alpha=group["lr"])

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state


def _adam_updates(states: list[dict[str, Tensor]], gradients: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Advance the moments by the gradients, and give Adam's changes of the weights at a learning rate of 1."""
    means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    beta1, beta2 = map(float, group["betas"])
    # torch's one kernel moves what it is given: from zero, so that the change itself is left, without cancellation
    updates = [torch.zeros_like(mean) for mean in means]
    adam(
        updates, gradients, means, squares, [], steps, fused=True, amsgrad=False, maximize=False,
        lr=1.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=group["eps"],
    )  # fmt: skip
    return updates


def _radial(
    weight: Tensor, gradient: Tensor, update: Tensor, delta: float
) -> tuple[Float[Tensor, " c"], Bool[Tensor, ""]]:
    """How much of each channel is the radial part of the update where the cosine test holds, and whether it holds.

    Tests and projections follow from norms and dot products a channel, which add up to those of the layer.
    """
    w, g, q = (tensor.reshape(len(weight), -1) for tensor in (weight, gradient, update))
    w_norm, g_norm = torch.linalg.vector_norm(w, dim=1), torch.linalg.vector_norm(g, dim=1)
    wg, wq, ww = _dots(w, g), _dots(w, q), w_norm.square()
    by_channel = _cosine(wg, w_norm, g_norm).amax() < delta / w.shape[1] ** 0.5
    # only where the channels fail the test, see `radial`
    by_layer = _cosine(wg.sum(), w_norm.norm(), g_norm.norm()) < delta / w.numel() ** 0.5
    layer = (wq.sum() / ww.sum().clamp_min(_SMALLEST_NORM)) * by_layer
    radial = torch.where(by_channel, wq / ww.clamp_min(_SMALLEST_NORM), layer)
    return radial, torch.logical_or(by_channel, by_layer)


def _dots(a: Float[Tensor, "c n"], b: Float[Tensor, "c n"]) -> Float[Tensor, " c"]:
    """Dot products by row; of a large table in parts, whose products of elements stay in a CPU's cache."""
    rows = max(1, _CACHED // max(1, a.shape[1])) if a.device.type == "cpu" else max(1, len(a))
    parts = zip(torch.split(a, rows), torch.split(b, rows), strict=True)
    dots = [torch.linalg.vecdot(*part) for part in parts]
    return dots[0] if len(dots) == 1 else torch.cat(dots)


def _cosine(wg: Tensor, w_norm: Tensor, g_norm: Tensor) -> Tensor:
    return wg.abs() / (w_norm * g_norm).clamp_min(_SMALLEST_NORM)
