"""Replies as whole numbers that are summed: how a client lays its reply out, and what the server reads in the sum."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.privacy.masking.fixed_point import FixedPoint, Residues
from polyfed.wire.payload import BUNDLE_KINDS, Payload, TensorBundle

WORDS, LAYOUT = "words", "layout"
TOTAL = "secure_total"
"""Field of a request: sum of the weights of all who are asked, of one type."""


@dataclass(frozen=True)
class SummedReply:
    """A reply, or the sum of several of one type, as words.

    Attributes:
        words: values of all tensors one after the other, then the weight.
        layout: JSON that is equal for all of a type: fields, kinds, names, types of numbers and shapes.
    """

    words: Residues
    layout: str

    @classmethod
    def of(cls, content: Payload, by: str | None, total: int, numbers: FixedPoint) -> SummedReply:
        """A client's reply.

        Args:
            content: tensors, and the weight.
            by: the scalar field that is the weight; None: each client counts alike.
            total: of the weights of all who are asked.
            numbers: the layout of values.

        Raises:
            PayloadError: values are beyond the range, or the weight is beyond the total.
        """
        weight = 1 if by is None else content.fields[by]
        if not isinstance(weight, int) or not 0 <= weight <= total < 1 << (numbers.bits - 1):
            raise PayloadError(f"this client's weight does not fit {TOTAL}, {total}")
        parts: list[Residues] = []
        layout: list[Any] = []
        for field, bundle in sorted(content.bundles.items()):
            entries = []
            for name, values in sorted(bundle.items()):
                parts.append(numbers.encoded(_array(values), weight / total))
                entries.append([name, str(values.dtype).removeprefix("torch."), list(values.shape)])
            layout.append([field, bundle.label, bundle.attributes(), entries])
        parts.append(np.array([weight], numbers.dtype))
        words: Any = np.concatenate(parts)
        return cls(words, json.dumps(layout))

    def payload(self) -> Payload:
        signed = torch.from_numpy(self.words.view(np.int32 if self.words.dtype == np.uint32 else np.int64))
        return Payload({WORDS: TensorBundle({WORDS: signed}), LAYOUT: self.layout})

    @classmethod
    def received(cls, payload: Payload, numbers: FixedPoint) -> SummedReply:
        """What crossed.

        Raises:
            PayloadError: it is of another form, such as a reply in the clear.
        """
        words, layout = payload.bundles.get(WORDS), payload.scalars.get(LAYOUT)
        wanted = torch.int32 if numbers.bits == 32 else torch.int64
        if set(payload.fields) != {WORDS, LAYOUT} or words is None or not isinstance(layout, str):
            raise PayloadError(f"a reply of {sorted(payload.fields)}, expected words to be summed and their layout")
        if set(words) != {WORDS} or words[WORDS].dtype != wanted or words[WORDS].ndim != 1 or not len(words[WORDS]):
            raise PayloadError(f"words to be summed are not one vector of {wanted}")
        return cls(words[WORDS].cpu().numpy().view(numbers.dtype), layout)

    def mean(self, by: str | None, clients: int, total: int, numbers: FixedPoint) -> tuple[Payload, int]:
        """The weighted mean, and the weight of all who are in it.

        Args:
            by, total, numbers: as of the replies.
            clients: so many replies are in the sum.

        Raises:
            PayloadError: words and layout do not match, or the weights are more than were asked for, or 0.
        """
        weight = int(self.words[-1])
        if not 0 < weight <= total or (by is None and weight != clients):
            raise PayloadError(f"weights of {clients} clients that sum to {weight}, of {total} that were asked")
        reader = _Reader(self.words[:-1], numbers, weight / total)
        fields = {name: reader.bundle(kind, about, entries) for name, kind, about, entries in json.loads(self.layout)}
        if reader.place != len(self.words) - 1:
            raise PayloadError(f"{len(self.words) - 1} words, the layout has {reader.place}")
        return Payload(dict(fields)), weight


@dataclass
class _Reader:
    """Takes tensors out of the words of a sum, one after the other."""

    words: Residues
    numbers: FixedPoint
    share: float
    place: int = 0

    def bundle(self, kind: str, about: dict[str, Any], entries: list[Any]) -> TensorBundle:
        tensors = {name: self.tensor(getattr(torch, dtype), shape) for name, dtype, shape in entries}
        return BUNDLE_KINDS[kind](tensors=tensors, **about)

    def tensor(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        like = np.dtype(np.float64 if dtype.is_floating_point else np.int64)
        values = torch.from_numpy(self.numbers.mean(self._next(prod(shape)), self.share, like))
        return (values if dtype.is_floating_point else values.round()).to(dtype).reshape(shape)

    def _next(self, number: int) -> Residues:
        self.place += number
        if self.place > len(self.words):
            raise PayloadError(f"{len(self.words)} words, the layout has more")
        return self.words[self.place - number : self.place]


def _array(values: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = (values.double() if values.is_floating_point() else values.long()).detach().cpu().numpy()
    return array
