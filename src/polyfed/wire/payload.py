"""Payloads: all that crosses between server and clients.

A payload is a set of named fields; a field is a scalar or a bundle, that is, named tensors of a declared kind.
``framing`` lays it out on a wire.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.wire.limits import Limits

_LARGEST = 1 << 63
_VARIANCE = "running_var"  # torch's own name
_ALIGNMENT = 64  # bytes, that of torch's own allocations

Scalar = int | float | str | bool
Specs = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


@dataclass(frozen=True)
class TensorBundle(Mapping[str, Tensor]):
    """Named tensors of one kind. The tensors are shared by reference in-process: receivers only read them.

    So what is derived from a broadcast is derived once for all clients.
    """

    tensors: Mapping[str, Tensor]
    label: ClassVar[str] = "tensors"
    limit: ClassVar[str] = "tensor_norm"
    """Name of the bound in ``Limits`` of each of ``norms``."""
    has_variances: ClassVar[bool] = False
    """True if running variances of a batch normalisation are among the tensors, which must not be negative."""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    # those of ``Mapping`` go through ``__getitem__`` for each tensor

    def keys(self) -> KeysView[str]:
        return self.tensors.keys()

    def values(self) -> ValuesView[Tensor]:
        return self.tensors.values()

    def items(self) -> ItemsView[str, Tensor]:
        return self.tensors.items()

    def attributes(self) -> dict[str, Scalar]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "tensors"}

    @cached_property
    def is_settled(self) -> bool:
        """Whether its tensors are ``settled``."""
        return all(map(is_laid_out, self.tensors.values()))

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """Equal for bundles that hold the very same tensors under the same names."""
        return self.label, tuple(self.attributes().items()), tuple((name, id(tensor)) for name, tensor in self.items())

    @cached_property
    def specs(self) -> Specs:
        return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.items())

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of kind, attributes, names, types, shapes and values, the same on every engine."""
        digest = hashlib.sha256(json.dumps([self.label, self.attributes()], sort_keys=True).encode())
        for name, value in sorted(self.items()):
            # a view as bytes: numpy has no bfloat16
            content = value.detach().cpu().contiguous()
            digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
            values: Any = content.reshape(-1).view(torch.uint8).numpy() if content.numel() else b""
            digest.update(values)
        return digest.digest()

    @cached_property
    def _known(self) -> dict[str, list[float]]:
        """Figures for checks, once they are fetched; ``rises``, which depend on what was sent, until they are used."""
        return {}

    def _figures(self, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Figures that are not fetched yet, [k], fp32, on the device."""
        made = {"rises": _rises(self, sent)} if sent else {}
        if "norms" not in self._known:
            made["norms"] = self.norms([value for value in self.values() if value.is_floating_point()])
            variances = [value.flatten() for value in self._variances.values()]
            made["variances"] = torch.cat(variances).min()[None].float() if variances else torch.zeros(0)
        return made

    @property
    def _variances(self) -> dict[str, Tensor]:
        own = self.items() if self.has_variances else ()
        return {name: value for name, value in own if name.endswith(_VARIANCE) and value.numel()}

    def has_fallen(self, sent: Mapping[str, Tensor]) -> bool:
        """Whether a whole number is less than in ``sent``; training only counts up."""
        if "rises" not in self._known:
            fetch([(self, sent)])
        return any(rise < 0 for rise in self._known.pop("rises", ()))

    def require_sound(self, what: str, limits: Limits, sent: Mapping[str, Tensor]) -> None:
        """``Payload.require_sound`` of the field ``what``, once its figures are fetched."""
        floating = (name for name, value in self.items() if value.is_floating_point())
        for name, norm in zip(floating, self._known["norms"], strict=True):
            allowed = getattr(limits, self.limit)
            if norm <= allowed:  # which one that is not finite is not
                continue
            if not bool(torch.isfinite(self.tensors[name]).all()):
                raise PayloadError(f"{what}: tensor '{name}' has NaN or infinite values")
            if name in sent:
                allowed = max(allowed, 2 * float(self.norms([sent[name]])))
            if not norm <= allowed:
                raise PayloadError(f"{what}: tensor '{name}' has norm {norm:.3g}, the limit is {allowed:g}")
        if any(least < 0 for least in self._known["variances"]):
            name, value = next((name, value) for name, value in self._variances.items() if bool((value < 0).any()))
            raise PayloadError(f"{what}: tensor '{name}' has a variance of {float(value.min()):.3g}")

    def norms(self, tensors: list[Tensor]) -> Tensor:
        """L2 norms of floating tensors, [k], fp32, on the device of the first."""
        norms = torch._foreach_norm(tensors, 2, _sum_type(*tensors)) if tensors else ()
        return _stacked(norms)


def fetch(checked: Collection[tuple[TensorBundle, Mapping[str, Tensor]]]) -> None:
    """Make all figures known that checks of bundles need, in one transfer: a device is waited for once.

    Args:
        checked: bundles, and the weights that their senders started from, if any.
    """
    waiting = [(bundle, *item) for bundle, sent in checked for item in bundle._figures(sent).items()]
    parts = [figures for _, _, figures in waiting if len(figures)]
    fetched = iter(torch.cat([figures.to(parts[0].device) for figures in parts]).tolist() if parts else ())
    for bundle, name, figures in waiting:
        bundle._known[name] = list(islice(fetched, len(figures)))


def _stacked(figures: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.to(figures[0].device) for one in figures]).float() if figures else torch.zeros(0)


def _rises(bundle: TensorBundle, sent: Mapping[str, Tensor]) -> Tensor:
    """Least change of whole numbers in all tensors of a shape, [shapes], fp32."""
    alike: dict[tuple[object, ...], list[tuple[Tensor, Tensor]]] = {}
    for name, value in bundle.items():
        old = None if value.is_floating_point() or not value.numel() else sent.get(name)
        if old is not None and old.shape == value.shape and not old.is_meta:
            alike.setdefault((value.shape, value.device, old.device), []).append((value, old))
    pairs = [[torch.stack(values).double() for values in zip(*pairs, strict=True)] for pairs in alike.values()]
    return _stacked([(new - old.to(new.device)).min() for new, old in pairs])


def grouped(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names in groups of one type and device, each of a quarter of all numbers at most or of one tensor.

    An operation over a group thus leaves a quarter of a model in memory, and there are few groups in large models too.
    """
    sizes = [tensor.numel() for tensor in tensors.values()]
    most = sum(sizes) // 4
    groups: list[list[str]] = []
    last: dict[object, tuple[list[str], int]] = {}
    for (name, tensor), own in zip(tensors.items(), sizes, strict=True):
        names, size = last.get((tensor.dtype, tensor.device), ([], most))
        if not names or size + own > most:
            groups.append(names := [])
            size = 0
        names.append(name)
        last[tensor.dtype, tensor.device] = names, size + own
    return groups


def is_laid_out(tensor: Tensor) -> bool:
    """Whether a tensor is ``settled``."""
    # a view into another tensor, such as a slice of a bank, may start anywhere
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


def settled(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, in the one memory layout in which all engines hand tensors over.

    Sums over a tensor depend on its strides and on its alignment (vector instructions start elsewhere), so the same
    values could otherwise give other bits by reference than from a buffer.
    """
    return tensor if is_laid_out(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _sum_type(*tensors: Tensor) -> torch.dtype:
    # squares of float16 overflow from 256 on, so sums are taken in fp32
    return torch.float64 if torch.float64 in {tensor.dtype for tensor in tensors} else torch.float32


@dataclass(frozen=True)
class Weights(TensorBundle):
    """Model parameters and buffers by name."""

    label: ClassVar[str] = "weights"
    has_variances: ClassVar[bool] = True

    def part(self, names: Collection[str]) -> Weights:
        """Tensors with these names."""
        return Weights({name: value for name, value in self.tensors.items() if name in names})


@dataclass(frozen=True)
class PublicRows(TensorBundle):
    """One row a sample of the public set, in the order that ``order`` identifies: name -> [n, w]."""

    order: str = ""
    label: ClassVar[str] = "rows"
    limit: ClassVar[str] = "row_norm"

    def norms(self, tensors: list[Tensor]) -> Tensor:
        """Largest L2 norm of a row of each tensor, [k], fp32; one row that is not finite makes it so."""
        largest = [torch.zeros(())] * len(tensors)
        for k, tensor in enumerate(tensors):
            if tensor.numel():
                dim = -1 if tensor.ndim else None
                largest[k] = torch.linalg.vector_norm(tensor, dim=dim, dtype=_sum_type(tensor)).max()
        return _stacked(largest)

    def require_public(self, order: str) -> None:
        """Raise PayloadError unless these are floating rows of the public set ``order``, or of a draw from it."""
        if self.order and self.order.partition("/")[0] != order:
            raise PayloadError(f"{self.label} of another public set or order ({self.order}, expected {order})")
        for name, tensor in self.items():
            if tensor.ndim != 2 or not tensor.is_floating_point():
                raise PayloadError(f"tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, expected floating rows")

    def require(self, order: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise PayloadError unless these are floating rows of these names and shapes, of the public set ``order``."""
        if self.order != order:
            raise PayloadError(f"{self.label} of another public set or order ({self.order}, expected {order})")
        if set(self) != set(shapes):
            raise PayloadError(f"{self.label} of {list(self)}, expected {list(shapes)}")
        for name, tensor in self.items():
            if tuple(tensor.shape) != tuple(shapes[name]) or not tensor.is_floating_point():
                raise PayloadError(
                    f"{self.label} of '{name}' are {tensor.dtype} {list(tensor.shape)}, expected {list(shapes[name])}"
                )


@dataclass(frozen=True)
class Representations(PublicRows):
    """Representations of public samples, modality -> [n, d]."""

    label: ClassVar[str] = "representations"


@dataclass(frozen=True)
class Logits(PublicRows):
    """Class scores (logits) of public samples, name of the target -> [n, classes]."""

    label: ClassVar[str] = "scores"


BUNDLE_KINDS: dict[str, type[TensorBundle]] = {
    cls.label: cls for cls in (TensorBundle, Weights, Representations, Logits)
}


@dataclass(frozen=True)
class Payload:
    """Named fields of a message."""

    fields: Mapping[str, TensorBundle | Scalar] = field(default_factory=dict)

    @cached_property
    def bundles(self) -> dict[str, TensorBundle]:
        return {name: value for name, value in self.fields.items() if isinstance(value, TensorBundle)}

    @cached_property
    def scalars(self) -> dict[str, Scalar]:
        return {name: value for name, value in self.fields.items() if not isinstance(value, TensorBundle)}

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all fields, the same on every engine."""
        parts = {name: bundle.digest.hex() for name, bundle in self.bundles.items()}
        return hashlib.sha256(json.dumps([self.scalars, parts], sort_keys=True).encode()).digest()

    def require_sound(self, limits: Limits, sent: Callable[[str], Mapping[str, Tensor]] = lambda field: {}) -> None:
        """Raise PayloadError if any tensor or number is NaN or infinite or cannot be, or a norm is beyond its limit.

        Args:
            limits: bounds of norms.
            sent: field -> weights that its sender started from: twice their norm is allowed where that is more than the
                limit, as no client is to blame for the work of others.
        """
        starts = {name: sent(name) for name in self.bundles}
        fetch([(bundle, starts[name]) for name, bundle in self.bundles.items()])
        for name, bundle in self.bundles.items():
            bundle.require_sound(name, limits, starts[name])
        for name, value in self.scalars.items():
            if isinstance(value, float) and not value - value == 0.0:
                raise PayloadError(f"{name} is {value}")
            if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
                raise PayloadError(f"{name} is a whole number beyond 64 bits")
