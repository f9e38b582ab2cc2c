"""One interface for sums of which the server sees nothing but the result, and their twin in the clear."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import floor, prod
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from torch import Tensor

from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.extras import how_to_install
from polyfed.core.settings import Settings
from polyfed.wire.payload import BUNDLE_KINDS, Payload, TensorBundle

Residues = NDArray[np.uint32] | NDArray[np.uint64]
"""Whole numbers modulo 2^32 or 2^64; numpy adds them so."""

_WHOLE = 8  # binary digits after the point of a mean of counters


@dataclass(frozen=True)
class FixedPoint:
    """Weighted values as words of k bits.

    A value x of a client whose weight is the share a of all weights together becomes round(a x 2^(k-2) / range). As
    shares sum to at most 1, a sum stays below 2^(k-2), and rounding, half a unit a client, in the bit above it.

    Attributes:
        range: largest magnitude of a value.
        bits: k.
    """

    range: float = 64.0
    bits: Literal[32, 64] = 32

    @property
    def dtype(self) -> Any:
        return np.uint32 if self.bits == 32 else np.uint64

    @property
    def resolution(self) -> float:
        """Size of a unit in the sum; each client rounds to half of it."""
        return self.range / 2.0 ** (self.bits - 2)

    def encoded(self, values: NDArray[Any], share: float | NDArray[np.float64]) -> Residues:
        """A client's values in their words, flat.

        Args:
            values: floating, or whole numbers, which have a range and resolution of their own.
            share: the client's weight over that of all who were asked, from 0 to 1; or one a value.

        Raises:
            PayloadError: a value is not finite, or beyond the range; it tells nothing of them, as the server reads it.
        """
        flat, limit = values.reshape(-1).astype(np.float64), self._limit(values.dtype)
        if not float(np.abs(flat).max(initial=0.0)) <= limit:
            raise PayloadError(
                f"a reply that does not fit {self.bits} bits of range {self.range:g}; raise aggregation.secure.range"
            )
        flat *= share * 2.0 ** (self.bits - 2) / limit
        return np.rint(flat, out=flat).astype(np.int64).astype(self.dtype)

    def mean(self, words: Residues, share: float, like: np.dtype[Any]) -> NDArray[np.float64]:
        """The weighted mean of which ``words`` are the sum.

        Args:
            words: sum of the words of all clients that count.
            share: sum of their shares, above 0.
            like: type of the values that the words are of.
        """
        signed = words.view(np.int32 if self.bits == 32 else np.int64).astype(np.float64)
        return signed * (self._limit(like) / 2.0 ** (self.bits - 2) / share)

    def _limit(self, dtype: np.dtype[Any]) -> float:
        is_floating = np.issubdtype(dtype, np.floating)
        return self.range if is_floating else 2.0 ** (self.bits - 2 - _WHOLE)


def total(words: Sequence[Residues]) -> Residues:
    """Sum modulo 2^k of vectors of one length."""
    result = words[0].copy()
    for other in words[1:]:
        result += other
    return result


FEWEST = 3
"""Clients of a type below which a sum tells one client the value of another."""


def _threshold(value: int | float) -> int | float:
    if isinstance(value, float) and not 0.5 < value <= 1:
        raise ValueError("threshold is a share of a type's clients (above 0.5, up to 1.0) or a number (whole)")
    if isinstance(value, int) and value < 2:
        raise ValueError(f"threshold is {value}; two clients or more must agree, and more than half of a type")
    return value


class SecureSum(Settings):
    """How clients of a type (one architecture, task and classes) add up replies as whole numbers modulo 2^bits."""

    home: ClassVar[str] = "polyfed.privacy.secure_sum"
    masks: ClassVar[bool] = True
    """Whether what a client sends is masked."""

    range: float = Field(
        default=64.0,
        gt=0,
        le=1e9,
        allow_inf_nan=False,
        description="largest magnitude of a value that is summed; who has a larger one is left out",
    )
    bits: Literal[32, 64] = Field(
        default=32, description="of each number; a unit of the sum is range / 2^(bits - 2), 6e-8 by default"
    )
    threshold: Annotated[int | float, AfterValidator(_threshold)] = Field(
        default=2 / 3,
        description="clients of a type without whom nothing is unmasked: a number, or a share (rounded up); always "
        "more than half of them",
    )

    @property
    def numbers(self) -> FixedPoint:
        return FixedPoint(self.range, self.bits)

    def required(self, clients: int) -> int:
        """t, of so many clients of a type that exchange keys."""
        # 2 / 3 of 9 is 6, although the product may be a bit more
        wanted = self.threshold if isinstance(self.threshold, int) else -floor(-self.threshold * clients + 1e-9)
        return max(wanted, clients // 2 + 1, 2)

    def require(self) -> None:
        """Check that what it takes is installed.

        Raises:
            ConfigError: it is not.
        """


class PairwiseMasks(SecureSum):
    """Masks that cancel in the sum, and one of each client's own (Bonawitz et al., CCS 2017, section 4 and figure 4).

    Client u sends x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv) modulo 2^k. The s_uv come of keys that
    the two agree on each round; of b_u and of u's key every client holds a share. t clients give the b of those who
    replied and the keys of those who did not, never both of one.
    """

    short_name: ClassVar[str] = "pairwise_masks"

    def require(self) -> None:
        """Check that the package with the ciphers is there.

        Raises:
            ConfigError: it is not.
        """
        if find_spec("cryptography") is None:
            raise ConfigError(
                "aggregation.secure 'pairwise_masks' needs the package 'cryptography', which is not installed; "
                f"{how_to_install('deploy')}"
            )


class Unmasked(SecureSum):
    """The same whole numbers without masks or keys: the server sees every reply. To compare with, bit for bit."""

    short_name: ClassVar[str] = "unmasked"
    masks: ClassVar[bool] = False


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
