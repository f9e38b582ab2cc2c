"""The transport: in what form tensors cross the wire. An option of the payload layer, not of a method."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float32, Int8
from pydantic import Field
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.core.settings import Settings
from polyfed.wire.framing import parsed_object, require_attributes
from polyfed.wire.limits import Limits
from polyfed.wire.payload import BUNDLE_KINDS, Coded, Payload, PublicRows, TensorBundle, Weights, settled

LEVELS = 127
"""Codes go from -127 to 127; -128 is not used, so that zero is exact and signs are alike."""

_TINY = torch.finfo(torch.float32).tiny
Roles = dict[str, Tensor]


@torch.no_grad()
def compressed(bundle: TensorBundle, dtype: torch.dtype) -> TensorBundle:
    """The bundle as it crosses: itself with fp32 tensors in a shorter type, or ``Coded`` where some are quantised.

    Args:
        bundle: to send.
        dtype: of fp32 tensors on the wire; int8: of those with two or more dimensions, others stay as they are.
    """
    if dtype == torch.float32:
        return _settled_bundle(bundle, bundle.tensors)
    laid: dict[str, Roles] = {}
    for name, value in bundle.items():
        if value.dtype != torch.float32:
            laid[name] = {"whole": value}
        elif dtype != torch.int8:
            laid[name] = {"whole": value.to(dtype)}
        elif value.ndim > 1 and 3 * value.numel() > 4 * len(value):
            laid[name] = dict(zip(("codes", "scales"), quantise(value), strict=True))
        else:  # of slices of one entry, scales would cost more than codes save
            laid[name] = {"whole": value}
    if all(roles.keys() == {"whole"} for roles in laid.values()):
        return _settled_bundle(bundle, {name: roles["whole"] for name, roles in laid.items()})
    tensors = {f"{name}:{role}": settled(value) for name, roles in laid.items() for role, value in roles.items()}
    return Coded(tensors, of=bundle.kind, about=json.dumps(bundle.attributes(), separators=(",", ":")))


def _settled_bundle(bundle: TensorBundle, tensors: Mapping[str, Tensor]) -> TensorBundle:
    """The bundle with these tensors for its own, ``settled``; itself where they are its own already."""
    if tensors is bundle.tensors and bundle.is_settled:
        return bundle
    tensors = {name: settled(value) for name, value in tensors.items()}
    is_same = all(value is bundle[name] for name, value in tensors.items())
    return bundle if is_same else type(bundle)(tensors=tensors, **bundle.attributes())


def bundle_kind(bundle: TensorBundle) -> str:
    """Kind of a bundle, or of what it stands for; nothing of it need have been checked."""
    return bundle.of if isinstance(bundle, Coded) and bundle.of in BUNDLE_KINDS else bundle.kind


def decompressed(bundle: TensorBundle, short: torch.dtype, limits: Limits) -> TensorBundle:
    """The bundle that ``compressed`` was given, as far as it crossed.

    Args:
        bundle: what arrived; nothing of it is trusted.
        short: floating type in which fp32 tensors cross.
        limits: on what it unpacks to.

    Raises:
        PayloadError: it is of no known kind or layout, its scales are out of range, or it would be larger than
            ``limits.message_bytes``.
    """
    if not isinstance(bundle, Coded):
        if short == torch.float32:
            return _settled_bundle(bundle, bundle.tensors)
        long = {name: value.float() if value.dtype == short else value for name, value in bundle.items()}
        return _settled_bundle(bundle, long)
    cls, attributes = BUNDLE_KINDS.get(bundle.of), parsed_object(bundle.about)
    if cls is None or cls is Coded:
        raise PayloadError(f"damaged message: coded '{bundle.of}', which is no kind of bundle")
    require_attributes(cls, attributes)
    total = sum(tensor.numel() * max(tensor.element_size(), 4) for tensor in bundle.values())
    if total > limits.message_bytes:
        raise PayloadError(
            f"bundle that unpacks to {total:,} bytes, the limit is {limits.message_bytes:,} (limits.message_bytes)"
        )
    by_name: dict[str, Roles] = {}
    for label, tensor in bundle.items():
        name, _, role = label.rpartition(":")
        by_name.setdefault(name, {})[role] = tensor
    return cls(tensors={name: _read(name, roles, short) for name, roles in by_name.items()}, **attributes)


def _read(name: str, roles: Roles, short: torch.dtype) -> Tensor:
    if roles.keys() == {"whole"}:
        whole = roles["whole"]
        return whole.float() if whole.dtype == short else whole
    if roles.keys() != {"codes", "scales"}:
        raise PayloadError(f"damaged message: tensor '{name}' is laid out as {sorted(roles)}")
    codes, scales = roles["codes"], roles["scales"]
    fits = codes.ndim and scales.shape == codes.shape[:1]
    if not fits or (codes.dtype, scales.dtype) != (torch.int8, torch.float32):
        raise PayloadError(
            f"damaged message: tensor '{name}' has {codes.dtype} codes {list(codes.shape)} and {scales.dtype} scales "
            f"{list(scales.shape)}"
        )
    if not bool(((scales >= 0) & (scales < torch.inf)).all()):
        raise PayloadError(f"tensor '{name}' has NaN or infinite values, or negative scales")
    return dequantise(codes, scales)


def quantise(values: Float32[Tensor, " n *rest"]) -> tuple[Int8[Tensor, " n *rest"], Float32[Tensor, " n"]]:
    """Codes and one scale for each slice of the first dimension (a row, an output channel).

        s_i = max_j |x_ij| / 127,    q_ij = round(x_ij / s_i) to the nearest, ties to even

    An entry is off by at most s_i / 2 = max_j |x_ij| / 254, and by the rounding of fp32 on top, less than 2^-15 of
    that. Slices below 127 * 2^-126 become zero. One with NaN or infinite entries has such a scale, which
    whoever receives it refuses.
    """
    if not values.numel():
        return values.to(torch.int8), values.new_zeros(len(values))
    rows = values.flatten(1)
    scales = torch.maximum(rows.amax(1), -rows.amin(1)) / LEVELS  # faster than aminmax, and than a copy by abs
    scales = torch.where(scales < _TINY, 0.0, scales)
    codes = rows / torch.where(scales == 0, 1.0, scales)[:, None]
    return codes.round_().to(torch.int8).view(values.shape), scales


def dequantise(codes: Int8[Tensor, " n *rest"], scales: Float32[Tensor, " n"]) -> Float32[Tensor, " n *rest"]:
    return codes.float().mul_(scales.view(-1, *[1] * (codes.ndim - 1)))


Encoding = Literal["float32", "float16", "bfloat16", "int8"]
_WIRE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}


class Transport(Settings):
    """How tensors are encoded on the wire; receivers get fp32 back."""

    dtype: Encoding = Field(
        default="float32",
        description="type in which fp32 tensors cross, unless a key below says otherwise; int8: eight-bit integers "
        "with a scale for each row",
    )
    representations: Encoding | None = Field(
        default=None, description="type of representations and scores; None: dtype"
    )
    weights: Encoding | None = Field(default=None, description="type of weights; None: dtype")

    def encode(self, payload: Payload) -> Payload:
        """The payload as it crosses the wire."""
        return self.encoder()(payload)

    def encoder(self) -> Callable[[Payload], Payload]:
        """``encode`` for several payloads: what they share is encoded once and stays shared."""
        return _each(lambda item: compressed(item, self._dtype(type(item))))

    def decode(self, payload: Payload, limits: Limits | None = None) -> Payload:
        """The payload as the receiver sees it.

        Args:
            payload: what arrived.
            limits: on what it unpacks to.

        Raises:
            PayloadError: a compressed bundle is damaged.
        """

        def decoded(item: TensorBundle) -> TensorBundle:
            dtype = self._dtype(BUNDLE_KINDS.get(item.of, TensorBundle) if isinstance(item, Coded) else type(item))
            # beside quantised tensors, others cross whole
            return decompressed(item, torch.float32 if dtype == torch.int8 else dtype, limits or Limits())

        return _each(decoded)(payload)

    def _dtype(self, cls: type[TensorBundle]) -> torch.dtype:
        rows = self.representations if issubclass(cls, PublicRows) else None
        return _WIRE[(self.weights if issubclass(cls, Weights) else rows) or self.dtype]


def _each(change: Callable[[TensorBundle], TensorBundle]) -> Callable[[Payload], Payload]:
    """``change`` for every bundle; what is the same is changed once."""
    # keys hold ids of tensors; the originals are kept, so that no other tensor gets such an id meanwhile
    made: dict[Any, tuple[TensorBundle, TensorBundle]] = {}

    def changed(item: TensorBundle) -> TensorBundle:
        if item.identity not in made:
            made[item.identity] = item, change(item)
        return made[item.identity][1]

    def changed_all(payload: Payload) -> Payload:
        new = {name: changed(item) for name, item in payload.bundles.items()}
        if all(item is payload.fields[name] for name, item in new.items()):
            return payload  # what is known of it stays known
        return Payload({name: new.get(name, item) for name, item in payload.fields.items()})

    return changed_all
