"""Mechanisms of differential privacy: clipping and noise of a reply before it leaves its client."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float64
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.privacy.secret import keyed_digest, normal_draws
from polyfed.privacy.settings import EXAMPLES, ReplyProtection
from polyfed.wire.payload import Logits, Payload, PublicRows, TensorBundle, Weights

_VARIANCE = "running_var"  # torch's own name; noise must not make one negative
_GRID = 4096.0  # steps of a released value in a standard deviation of its noise
_INSIDE = 1 - 1e-12  # rounding must not leave a clipped value outside


def released(content: Payload, received: Payload, protection: ReplyProtection, key: bytes, samples: int) -> Payload:
    """A reply with its tensors protected.

    Args:
        content: Payload that the step returned.
        received: Payload of the request.
        protection: Clipping norms and noise.
        key: Key of the noise, for this reply only.
        samples: Number of private training samples, which is public.

    Raises:
        PayloadError: the reply holds a field that is not covered.
    """
    if unknown := next((name for name in content.scalars if name != EXAMPLES), None):
        raise PayloadError(f"'{unknown}' in the reply is a number that differential privacy does not cover")
    fields = dict(content.fields) | ({EXAMPLES: samples} if EXAMPLES in content.scalars else {})
    for name, bundle in content.bundles.items():
        if (clip := protection.clips.get(type(bundle))) is None:
            raise PayloadError(f"'{name}' in the reply ({bundle.label}) has no clipping norm in privacy.reply")
        own = keyed_digest(key, name.encode())
        if isinstance(bundle, Weights):
            fields[name] = _update(bundle, received.bundles.get(name, {}), clip, protection, own)
        elif isinstance(bundle, PublicRows):
            fields[name] = _rows(bundle, clip, protection, own)
    return Payload(fields)


def require_updates(content: Payload, received: Payload) -> None:
    """Check that weights in a reply are those that the client received, changed.

    Raises:
        PayloadError: their names or shapes differ.
    """
    for field, bundle in content.bundles.items():
        if isinstance(bundle, Weights):
            sent = received.bundles.get(field, Weights({}))
            if sorted(bundle) != sorted(sent) or any(bundle[name].shape != sent[name].shape for name in sent):
                raise PayloadError(f"the reply's '{field}' are not the weights that were sent to the client")


def noisy(values: Float64[Tensor, ...], deviation: float, key: bytes) -> Float64[Tensor, ...]:
    """Values with Gaussian noise, rounded to a grid much finer than it.

    The low bits of sums of floating numbers separate noise from the values under it (Mironov, CCS 2012); the grid
    removes them.
    """
    noise = normal_draws(key, values.numel()).reshape(values.shape).to(values.device)
    step = deviation / _GRID
    return ((values + deviation * noise) / step).round() * step


def rows_within(rows: Tensor, clip: float) -> Float64[Tensor, "n d"]:
    """Rows [n, d], each of norm ``clip`` at most; longer ones are scaled down."""
    exact = rows.double()
    norms = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    short: Tensor = exact * (clip / norms * _INSIDE).clamp_max(1.0).nan_to_num(1.0)
    return short


def _deviation(protection: ReplyProtection, length: float) -> float:
    assert protection.noise_multiplier is not None
    return protection.noise_multiplier * length


def _update(bundle: Weights, sent: Mapping[str, Tensor], clip: float, reply: ReplyProtection, key: bytes) -> Weights:
    """Update clipped as one vector, with noise in every entry; integers go back as they came."""
    changes = {
        name: x.double() - sent[name].to(x.device).double() for name, x in bundle.items() if x.is_floating_point()
    }
    norm = math.sqrt(sum(float(change.square().sum()) for change in changes.values()))
    scale = min(1.0, clip / norm * _INSIDE) if norm else 1.0
    tensors = {name: sent[name].to(value.device, value.dtype) for name, value in bundle.items()}
    for name, change in changes.items():
        own = keyed_digest(key, name.encode())
        new = sent[name].to(change.device).double() + noisy(scale * change, _deviation(reply, clip), own)
        tensors[name] = (new.clamp_min(0) if name.endswith(_VARIANCE) else new).to(bundle[name].dtype)
    return Weights(tensors)


def _rows(bundle: PublicRows, clip: float, protection: ReplyProtection, key: bytes) -> TensorBundle:
    """Every row clipped, or turned into a vote; noise by the length of all rows together."""
    count = sum(value.numel() // value.shape[-1] for value in bundle.values())
    is_vote = protection.votes and isinstance(bundle, Logits)
    deviation = _deviation(protection, (1.0 if is_vote else clip) * count**0.5)
    tensors = {}
    for name, value in bundle.items():
        rows = _one_hot(value) if is_vote else rows_within(value, clip)
        made = noisy(rows, deviation, keyed_digest(key, name.encode()))
        tensors[name] = (clip * _one_hot(made) if is_vote else made).to(value.dtype)
    return replace(bundle, tensors=tensors)


def _one_hot(scores: Tensor) -> Float64[Tensor, "n c"]:
    return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).double()
