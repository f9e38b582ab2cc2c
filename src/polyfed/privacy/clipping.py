"""Norm clipping: an update far longer than usual is scaled down, tensor by tensor of weights, row by row of others.

Source: norm clipping of updates (Sun et al. 2019, "Can You Really Backdoor Federated Learning?"), with the median of
the cohort's last updates in place of a constant, and redescending (Hampel 1974): what is r bounds long counts as 1 / r
bounds, so that the farther out an update is, the less it moves a mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from statistics import median

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.settings import Settings
from polyfed.wire.payload import TensorBundle, Weights

ENOUGH = 3
"""Clients from which on a median can be trusted: of fewer, one alone could move it."""

Norms = Mapping[str, Tensor]
"""Tensor -> L2 norm of its update [], of a tensor of whole numbers its largest step []; of rows, norms [n]."""
Usual = dict[str, float]
"""Tensor -> median of such norms over the clients of one type."""

# torch's own names, and running means of classes; their size is that of a client's data
_STATISTICS = ("running_mean", "running_var", "running_sums", "running_mass")
_ROOM = 4.0  # times what other tensors may move: for statistics, and for vectors, which often start at 0


class Clipping(Settings):
    """What one client may do to an average, relative to the others of its type, which a minority cannot move.

    It streams: what was usual in the last ask of a step bounds the next. Where that is not known, or is more, a tensor
    of weights may move as far as it is long.
    """

    times: float = Field(
        default=4.0,
        gt=0,
        allow_inf_nan=False,
        description="longest update that counts as it is, in medians of its type's last ones, times the client's "
        "samples over theirs where these are more; longer ones are scaled down, the longer the more, and count less",
    )
    weight: float | None = Field(
        default=6.0,
        ge=1,
        allow_inf_nan=False,
        description="samples that a client counts for at most in an average, in medians of its peers; None: all",
    )


# ---- how long updates are


@torch.no_grad()
def update_norms(bundle: TensorBundle, start: Mapping[str, Tensor]) -> Norms:
    """How far a client moved each tensor of weights from ``start``, or from 0; of other kinds, how long rows are."""
    floating = _floating(bundle)
    if not isinstance(bundle, Weights):
        return {name: torch.linalg.vector_norm(value, dim=-1) for name, value in floating.items() if value.ndim}
    changes = {name: value - start[name].to(value) if name in start else value for name, value in floating.items()}
    counters = {name: value for name, value in bundle.items() if name not in floating and value.numel()}
    return _norms(changes) | {name: _steps(value, start.get(name)).max() for name, value in counters.items()}


def _floating(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.float() for name, value in tensors.items() if value.is_floating_point()}


def _norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(tensors, torch._foreach_norm(list(tensors.values())), strict=True)) if tensors else {}


def _steps(value: Tensor, start: Tensor | None) -> Tensor:
    return value.double() if start is None else value.double() - start.to(value.device).double()


def lengths(norms: Norms) -> Usual:
    """One length a tensor: of rows their median."""
    if not norms:
        return {}
    values = [norm.median() if norm.numel() else norm.new_zeros(()) for norm in norms.values()]
    found: list[float] = torch.stack([value.double() for value in values]).tolist()
    return dict(zip(norms, found, strict=True))


def medians(seen: Sequence[Usual], entries: Mapping[str, int]) -> Usual:
    """What is usual; nothing if there are too few updates, or most did not move.

    A tensor that most clients hardly move may still move as far, entry by entry, as the median update does on average,
    and a counter by one.

    Args:
        seen: lengths of one update each.
        entries: floating tensor of weights -> its number of entries; empty for rows.
    """
    if len(seen) < ENOUGH:
        return {}
    found = {name: median(one.get(name, 0.0) for one in seen) for name in dict.fromkeys(chain(*seen))}
    if not entries:
        return {name: value for name, value in found.items() if value}
    entry = median(_an_entry(one, entries) for one in seen)
    return {name: max(value, _floor(name, entry, entries)) for name, value in found.items()} if entry else {}


def _floor(name: str, entry: float, entries: Mapping[str, int]) -> float:
    return entry * math.sqrt(entries[name]) if name in entries else 1.0


def _an_entry(norms: Mapping[str, float], entries: Mapping[str, int]) -> float:
    """Root mean square of an entry of tensors of these norms; of weights, as statistics are of another size."""
    weights = [name for name in entries if not is_statistic(name)] or list(entries)
    size = sum(entries[name] for name in weights)
    return math.sqrt(sum(norms.get(name, 0.0) ** 2 for name in weights) / max(size, 1))


# ---- how long they may be


def reach_of(sent: Mapping[str, Tensor], bundle: Weights, samples: int) -> Usual:
    """How far weights may move whatever others do: a tensor as far as it is long, or as entries of the model are.

    Vectors and statistics have more room; tensors of whole numbers count the client's samples at most once. Where
    nothing was sent, nothing is known.

    Args:
        sent: what the client started from.
        bundle: what it sent back.
        samples: of the client.
    """
    floating = _floating(sent)
    own = lengths(_norms(floating))
    entry = _an_entry(own, {name: value.numel() for name, value in floating.items()})
    counters = {name: float(max(samples, 1)) for name, value in bundle.items() if not value.is_floating_point()}
    if not entry:
        return counters
    return counters | {name: _reach(name, value, own, entry) for name, value in bundle.items() if name not in counters}


def _reach(name: str, value: Tensor, own: Usual, entry: float) -> float:
    least = (1.0 if is_statistic(name) else entry) * math.sqrt(value.numel())
    return max(own.get(name, 0.0), least) * (_ROOM if value.ndim <= 1 else 1.0)


def room(name: str) -> float:
    """Times the median that a tensor may move beside the bound of all."""
    return _ROOM if is_statistic(name) else 1.0


def is_statistic(name: str) -> bool:
    """Whether a tensor of that name holds running statistics of a normalisation, which no gradient moves."""
    return name.endswith(_STATISTICS)


# ---- what becomes of longer ones


def excess(norms: Norms, bounds: Mapping[str, float]) -> tuple[float, str]:
    """How many bounds the longest update is, and of which tensor; 0 where nothing is bounded."""
    most = lengths({name: norm.max() for name, norm in norms.items() if norm.numel() and name in bounds})
    ratios = {name: value / bounds[name] for name, value in most.items() if value}
    worst = max(ratios, key=lambda name: ratios[name], default="")
    return ratios.get(worst, 0.0), worst


@torch.no_grad()
def clipped(
    bundle: TensorBundle, start: Mapping[str, Tensor], norms: Norms, bounds: Mapping[str, float]
) -> dict[str, Tensor]:
    """Tensors whose updates, or rows that, are r > 1 bounds long scaled down to 1 / r; others are the same tensors."""
    result = dict(bundle)
    for name, norm in norms.items():
        ratio = norm / bounds.get(name, inf)
        if not bool((ratio > 1).any()):
            continue
        value = bundle[name]
        scale = torch.where(ratio > 1, ratio.square().reciprocal(), 1.0)
        origin = start[name].to(value.device) if name in start else torch.zeros_like(value)
        if not value.is_floating_point():  # counters stay whole numbers
            result[name] = origin + (_steps(value, origin) * scale).floor().to(value.dtype)
        else:
            exact = torch.promote_types(value.dtype, torch.float32)
            factor = (scale[..., None] if norm.ndim else scale).to(exact)
            shorter = torch.lerp(origin.to(exact), value.to(exact), factor).to(value.dtype)
            result[name] = torch.where(factor < 1, shorter, value)
    return result
