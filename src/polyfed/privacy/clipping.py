"""Norm clipping: an update whose norm is far beyond the usual is scaled down as a whole.

Source: norm clipping of updates (Sun et al. 2019, "Can You Really Backdoor Federated Learning?"), with a multiple of
the median norm of the last updates in place of a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.settings import Settings
from polyfed.wire.payload import TensorBundle

ENOUGH = 3
"""Clients from which on a median can be trusted: of fewer, one alone could move it."""


class Clipping(Settings):
    """How long an update may be, in medians of the norms of the last ask of its step, by field and architecture.

    Sun et al. (2019) have a constant; what the last ask says needs no tuning, and lets no reply wait. The first ask is
    unbounded. The norm is one of all floating tensors of a field: of weights, of how they changed; of others, of what
    they are.
    """

    times: float = Field(
        default=4.0,
        gt=0,
        allow_inf_nan=False,
        description="longest update, in medians; longer ones are scaled down to it",
    )
    weight: float | None = Field(
        default=None,
        ge=1,
        allow_inf_nan=False,
        description="samples that a client counts for at most in an average, in medians of its peers; None: all",
    )


def median_norm(norms: Iterable[float]) -> float | None:
    """The median; None of too few norms, or where most are 0."""
    known = list(norms)
    return (median(known) or None) if len(known) >= ENOUGH else None


@torch.no_grad()
def update_norm(bundle: TensorBundle, start: Mapping[str, Tensor]) -> float:
    """L2 norm of the change of all floating tensors from ``start``; tensors that are not in it start from 0."""
    norms = [
        torch.linalg.vector_norm(_exact(value) - start[name].to(_exact(value)) if name in start else _exact(value))
        for name, value in bundle.items()
        if value.is_floating_point()
    ]
    return float(torch.stack([norm.float() for norm in norms]).norm()) if norms else 0.0


@torch.no_grad()
def scaled(bundle: TensorBundle, start: Mapping[str, Tensor], factor: float) -> TensorBundle:
    """The bundle with ``factor`` times its change from ``start``; tensors of whole numbers stay as they are."""
    tensors = dict(bundle)
    for name, value in bundle.items():
        if value.is_floating_point():
            exact = _exact(value)
            origin = start[name].to(exact) if name in start else torch.zeros_like(exact)
            tensors[name] = torch.lerp(origin, exact, factor).to(value.dtype)
    return type(bundle)(tensors=tensors, **bundle.attributes())


def _exact(value: Tensor) -> Tensor:
    """At least fp32: squares of float16 overflow from 256 on."""
    return value.to(torch.promote_types(value.dtype, torch.float32))
