"""Bundles in a compressed form, and back: tensors laid out by role, checked before they are used.

A tensor ``w`` of a ``Coded`` bundle is one or several tensors on the wire, named by their roles:

    w:whole                          as it is, or in a shorter floating type
    w:codes, w:scales                eight-bit integers, one fp32 scale for each slice of the first dimension
    w:base                           (empty) what the receiver itself sent in this exchange, unchanged
    w:base, w:at, w:add              the same, with differences added at some entries of the flattened tensor
    w:base, w:at, w:codes, w:scales  likewise, differences as eight-bit integers

``w:zero`` in place of ``w:base``: the shape is that of what the receiver sent, its values do not count. So a message
says by itself how it is read, and nothing in it makes more memory than its own size or that of the receiver's message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int8, Int32
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.wire.framing import parsed_object, require_attributes
from polyfed.wire.limits import Limits
from polyfed.wire.payload import BUNDLE_KINDS, Coded, TensorBundle, settled

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MOST = (1 << 31) - 1  # entries that int32 can point at
LEVELS = 127
"""Codes go from -127 to 127; -128 is not used, so that zero is exact and signs are alike."""

_TINY = torch.finfo(torch.float32).tiny
Roles = dict[str, Tensor]


@dataclass(frozen=True)
class Compression:
    """How the tensors of a bundle cross.

    Attributes:
        dtype: type of fp32 tensors on the wire; int8: of those with two or more dimensions, others stay as they are.
        topk: share of the entries that cross of a tensor that the receiver knows in an earlier version, or None.
        omit: leave out what the receiver knows bit for bit.
    """

    dtype: torch.dtype = torch.float32
    topk: float | None = None
    omit: bool = False

    @property
    def whole(self) -> torch.dtype:
        """Type of fp32 tensors that cross whole."""
        return torch.float32 if self.dtype == torch.int8 else self.dtype


# ---- sending


@torch.no_grad()
def compressed(bundle: TensorBundle, compression: Compression, known: Mapping[str, Tensor]) -> TensorBundle:
    """The bundle as it crosses: itself in a shorter type if nothing else is to be done, or ``Coded``.

    Args:
        bundle: to send.
        compression: the type on the wire, and what may be left out.
        known: name -> tensor that the receiver of this message sent in the same exchange.
    """
    if compression == Compression() and bundle.is_settled:
        return bundle
    laid = {name: _laid_out(value, compression, _usable(known.get(name), value)) for name, value in bundle.items()}
    if all(roles.keys() == {"whole"} for roles in laid.values()):
        return settled_bundle(bundle, {name: roles["whole"] for name, roles in laid.items()})
    tensors = {f"{name}:{role}": settled(value) for name, roles in laid.items() for role, value in roles.items()}
    return Coded(tensors, of=bundle.kind, about=json.dumps(bundle.attributes(), separators=(",", ":")))


def _usable(known: Tensor | None, value: Tensor) -> Tensor | None:
    fits = known is not None and known.shape == value.shape and known.dtype == value.dtype
    return known.to(value.device) if known is not None and fits else None


def settled_bundle(bundle: TensorBundle, tensors: Mapping[str, Tensor]) -> TensorBundle:
    """The bundle with these tensors for its own, ``settled``; itself where they are its own already."""
    tensors = {name: settled(value) for name, value in tensors.items()}
    is_same = all(value is bundle[name] for name, value in tensors.items())
    return bundle if is_same else type(bundle)(tensors=tensors, **bundle.attributes())


def _laid_out(value: Tensor, compression: Compression, known: Tensor | None) -> Roles:
    if known is not None and compression.omit and torch.equal(_bits(value), _bits(known)):
        return {"base": value.new_empty(0)}
    if known is not None and compression.topk is not None and _thins(value, compression, compression.topk):
        return _thinned(value, known, compression, compression.topk)
    return _dense(value, compression)


def _dense(value: Tensor, compression: Compression) -> Roles:
    if value.dtype != torch.float32:
        return {"whole": value}
    # of slices of one entry, scales would cost more than codes save
    if compression.dtype == torch.int8 and value.ndim > 1 and 3 * value.numel() > 4 * len(value):
        codes, scales = quantise(value)
        return {"codes": codes, "scales": scales}
    return {"whole": value.to(compression.whole)}


def _thins(value: Tensor, compression: Compression, share: float) -> bool:
    """Whether some entries, with their places, are smaller than all; vectors such as biases stay whole."""
    size, count = compression.dtype.itemsize, value.numel()
    is_matrix = value.dtype == torch.float32 and value.ndim > 1 and count <= _MOST
    return is_matrix and kept(count, share) * (size + 4) < count * size


def _thinned(value: Tensor, known: Tensor, compression: Compression, share: float) -> Roles:
    # what a method sends under the name of something else, such as a change, may be nearer to nothing than to that
    moved = value - known
    near = bool(torch.linalg.vector_norm(moved) <= torch.linalg.vector_norm(value))
    moved = moved if near else value
    at = largest_entries(moved, share)
    picked = moved.flatten()[at.long()]
    roles = {"base" if near else "zero": value.new_empty(0), "at": at}
    if compression.dtype != torch.int8:
        return roles | {"add": picked.to(compression.dtype)}
    codes, scales = quantise(picked[None])
    return roles | {"codes": codes, "scales": scales}


def _bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


# ---- receiving


def bundle_kind(bundle: TensorBundle) -> str:
    """Kind of a bundle, or of what it stands for; nothing of it need have been checked."""
    return bundle.of if isinstance(bundle, Coded) and bundle.of in BUNDLE_KINDS else bundle.kind


def decompressed(coded: Coded, compression: Compression, known: Mapping[str, Tensor], limits: Limits) -> TensorBundle:
    """The bundle that ``compressed`` was given, as far as it crossed.

    Args:
        coded: what arrived; nothing of it is trusted.
        compression: of the bundle for which it stands.
        known: as the sender has it: name -> tensor that was sent to it in the same exchange.
        limits: on what it unpacks to.

    Raises:
        PayloadError: it is of no known kind or layout, its scales or places are out of range, it refers to what was not
            sent, or it would be larger than ``limits.message_bytes``.
    """
    kind, attributes = BUNDLE_KINDS.get(coded.of), parsed_object(coded.about)
    if kind is None or kind is Coded:
        raise PayloadError(f"damaged message: coded '{coded.of}', which is no kind of bundle")
    require_attributes(kind, attributes)
    by_name: dict[str, Roles] = {}
    for label, tensor in coded.items():
        name, _, role = label.rpartition(":")
        by_name.setdefault(name, {})[role] = tensor
    total = sum(_unpacked_bytes(roles, known.get(name)) for name, roles in by_name.items())
    if total > limits.message_bytes:
        raise PayloadError(
            f"bundle that unpacks to {total:,} bytes, the limit is {limits.message_bytes:,} (limits.message_bytes)"
        )
    tensors = {}
    for name, roles in by_name.items():
        if (read := _READERS.get(frozenset(roles))) is None:
            raise PayloadError(f"damaged message: tensor '{name}' is laid out as {sorted(roles)}")
        tensors[name] = read(name, roles, compression, known)
    return kind(tensors=tensors, **attributes)


def _unpacked_bytes(roles: Roles, known: Tensor | None) -> int:
    if "base" in roles or "zero" in roles:
        size = 0 if known is None else known.nbytes
        return max(size, 4 * roles["codes"].numel()) if "codes" in roles else size
    return sum(tensor.numel() * max(tensor.element_size(), 4) for tensor in roles.values())


def _whole(name: str, roles: Roles, compression: Compression, known: Mapping[str, Tensor]) -> Tensor:
    value = roles["whole"]
    return value.float() if value.dtype == compression.whole else value


def _quantised(name: str, roles: Roles, compression: Compression, known: Mapping[str, Tensor]) -> Tensor:
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


def _based(name: str, roles: Roles, compression: Compression, known: Mapping[str, Tensor]) -> Tensor:
    if name not in known:
        raise PayloadError(f"tensor '{name}' refers to one that was not sent to it in this exchange")
    return known[name].to(roles["base" if "base" in roles else "zero"].device)


def _completed(name: str, roles: Roles, compression: Compression, known: Mapping[str, Tensor]) -> Tensor:
    base, at = _based(name, roles, compression, known), roles["at"]
    values = roles["add"] if "add" in roles else _quantised(name, roles, compression, known).flatten()
    if base.dtype != torch.float32 or values.dtype not in _FLOATS:
        raise PayloadError(f"damaged message: {values.dtype} is added to tensor '{name}' of {base.dtype}")
    if at.dtype != torch.int32 or at.ndim != 1 or at.shape != values.shape:
        raise PayloadError(
            f"damaged message: tensor '{name}' has {at.dtype} places {list(at.shape)} for values {list(values.shape)}"
        )
    # ascending places are distinct: adding at one place twice would depend on the order of the additions
    if len(at) and not bool((at[0] >= 0) & (at[-1] < base.numel()) & (at[1:] > at[:-1]).all()):
        raise PayloadError(
            f"damaged message: places in tensor '{name}' do not ascend within its {base.numel()} entries"
        )
    result = base.flatten().clone() if "base" in roles else torch.zeros_like(base).flatten()
    result[at.long()] += values.float()
    return result.view(base.shape)


_READERS: dict[frozenset[str], Callable[[str, Roles, Compression, Mapping[str, Tensor]], Tensor]] = {
    frozenset({"whole"}): _whole,
    frozenset({"codes", "scales"}): _quantised,
    frozenset({"base"}): _based,
    **{
        frozenset({base, "at", *values}): _completed
        for base in ("base", "zero")
        for values in (("add",), ("codes", "scales"))
    },
}


# ---- eight-bit integers, and the entries that moved farthest


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


def largest_entries(values: Float32[Tensor, "*shape"], share: float) -> Int32[Tensor, " k"]:
    """Where the ceil(share n) entries of largest magnitude are in the flattened tensor, ascending.

    Of equal ones the first are taken. What is not finite counts as largest, so that it cannot go unnoticed.
    """
    sizes = values.flatten().abs()
    sizes = torch.where(sizes.isnan(), torch.inf, sizes)
    count = kept(sizes.numel(), share)
    if not count:
        return sizes.new_zeros(0, dtype=torch.int32)
    least = sizes.topk(count, sorted=False).values.amin()
    chosen = sizes > least
    ties = (sizes == least).nonzero().flatten()
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen.nonzero().flatten().int()


def kept(entries: int, share: float) -> int:
    return min(entries, math.ceil(share * entries - 1e-9))
