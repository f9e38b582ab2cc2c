"""Secure sums: settings, replies as integers modulo 2^k, and the mean that the server reads from their sum."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
"""Integers modulo 2^32 or 2^64, as numpy adds them."""

FEWEST = 3
"""Fewest clients of a type: a sum of two reveals the value of one to the other."""

WORDS, LAYOUT = "words", "layout"
TOTAL = "secure_total"
"""Field of a request: sum of the weights of all clients of the type that are asked."""
_FRACTION_BITS = 8  # binary digits after the point of a mean of counters


# ---- numbers


@dataclass(frozen=True)
class FixedPoint:
    """Weighted values as words of k bits, so that sums are exact in any order, masked or not.

    A value x of a client whose weight is the share a of all weights becomes round(a x 2^(k-2) / range). As shares sum
    to at most 1, a sum stays below 2^(k-2), and rounding, half a unit per client, in the bit above it.

    Attributes:
        range: Largest magnitude of a value.
        bits: Word size k.
    """

    range: float = 64.0
    bits: Literal[32, 64] = 32

    @property
    def dtype(self) -> Any:
        return np.uint32 if self.bits == 32 else np.uint64

    @property
    def signed(self) -> Any:
        return np.int32 if self.bits == 32 else np.int64

    @property
    def resolution(self) -> float:
        """Size of a unit in the sum; each client rounds to half of it."""
        return self.range / 2.0 ** (self.bits - 2)

    def encoded(self, values: NDArray[Any], share: float | NDArray[np.float64]) -> Residues:
        """A client's values as words, flat.

        Args:
            values: Floating numbers, or integers, which have a range and resolution of their own.
            share: The client's weight over that of all clients asked, from 0 to 1; one number, or one for each value.

        Raises:
            PayloadError: a value is not finite, or beyond the range; the message holds no value, as the server reads
                it.
        """
        flat, limit = values.reshape(-1).astype(np.float64), self._limit(values.dtype)
        if not float(np.abs(flat).max(initial=0.0)) <= limit:
            raise PayloadError(
                f"a reply that does not fit {self.bits} bits of range {self.range:g}; raise aggregation.secure.range"
            )
        flat *= share * 2.0 ** (self.bits - 2) / limit
        return np.rint(flat, out=flat).astype(np.int64).astype(self.dtype)

    def mean(self, words: Residues, share: float, like: np.dtype[Any]) -> NDArray[np.float64]:
        """The weighted mean whose sum is ``words``.

        Args:
            words: Sum of the words of all clients that count.
            share: Sum of their shares, above 0.
            like: Type of the encoded values.
        """
        values: NDArray[np.float64] = words.view(self.signed).astype(np.float64)
        return values * (self._limit(like) / 2.0 ** (self.bits - 2) / share)

    def _limit(self, dtype: np.dtype[Any]) -> float:
        return self.range if np.issubdtype(dtype, np.floating) else 2.0 ** (self.bits - 2 - _FRACTION_BITS)


def total(words: Sequence[Residues]) -> Residues:
    """Sum modulo 2^k of vectors of one length."""
    result = words[0].copy()
    for other in words[1:]:
        result += other
    return result


# ---- settings


def _threshold(value: int | float) -> int | float:
    if isinstance(value, float) and not 0.5 < value <= 1:
        raise ValueError("threshold is a share of a type's clients (above 0.5, up to 1.0) or a number (an integer)")
    if isinstance(value, int) and value < 2:
        raise ValueError(f"threshold is {value}; two clients or more must agree, and more than half of a type")
    return value


class SecureSum(Settings):
    """Sums of replies of a type (one architecture, task and classes) as integers modulo 2^bits."""

    home: ClassVar[str] = "polyfed.privacy.secure_sum"
    masks: ClassVar[bool] = True
    """True if the clients' words are masked."""

    range: float = Field(
        default=64.0,
        gt=0,
        le=1e9,
        allow_inf_nan=False,
        description="largest magnitude of a value that is summed; a client with a larger one is left out",
    )
    bits: Literal[32, 64] = Field(
        default=32, description="bits of each number; a unit of the sum is range / 2^(bits - 2), 6e-8 by default"
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
        """Threshold t for this number of clients of a type that exchange keys."""
        # 2 / 3 of 9 is 6, although the product may be a bit more
        wanted = self.threshold if isinstance(self.threshold, int) else -floor(-self.threshold * clients + 1e-9)
        return max(wanted, clients // 2 + 1, 2)

    def require(self) -> None:
        """Check that the packages of the rule are installed.

        Raises:
            ConfigError: one is missing.
        """


class PairwiseMasks(SecureSum):
    """Masks that cancel in the sum, and one mask of each client's own (Bonawitz et al., CCS 2017, section 4, figure 4).

    Client u sends x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv) modulo 2^k. The two clients u and v
    agree on s_uv each round; every client holds a share of b_u and of u's key. t clients reveal b of those that
    replied and the key of those that did not, never both of one client.
    """

    short_name: ClassVar[str] = "pairwise_masks"

    def require(self) -> None:
        """Check that the package with the ciphers is installed.

        Raises:
            ConfigError: it is missing.
        """
        if find_spec("cryptography") is None:
            what = "aggregation.secure 'pairwise_masks' needs the package 'cryptography', which is not installed"
            raise ConfigError(f"{what}; {how_to_install('deploy')}")


class Unmasked(SecureSum):
    """The same integers without masks or keys, to compare with bit for bit: the server sees every reply."""

    short_name: ClassVar[str] = "unmasked"
    masks: ClassVar[bool] = False


# ---- replies


@dataclass(frozen=True)
class SummedReply:
    """A reply, or the sum of several of one type, as words.

    Attributes:
        words: Values of all tensors in sequence, then the weight.
        layout: JSON that is equal for all replies of a type: fields, kinds, names, types of numbers and shapes.
    """

    words: Residues
    layout: str

    @classmethod
    def of(cls, content: Payload, by: str | None, total: int, numbers: FixedPoint) -> SummedReply:
        """A client's reply as words.

        Args:
            content: Tensors, and the weight.
            by: Scalar field that is the weight; None: each client counts alike.
            total: Sum of the weights of all clients asked.
            numbers: Encoding of values.

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
        words: Any = np.concatenate([*parts, np.array([weight], numbers.dtype)])
        return cls(words, json.dumps(layout))

    def payload(self) -> Payload:
        signed = torch.from_numpy(self.words.view(np.int32 if self.words.dtype == np.uint32 else np.int64))
        return Payload({WORDS: TensorBundle({WORDS: signed}), LAYOUT: self.layout})

    @classmethod
    def received(cls, payload: Payload, numbers: FixedPoint) -> SummedReply:
        """A summed reply as it crossed the wire.

        Raises:
            PayloadError: the payload has another form, such as a reply in the clear.
        """
        words, layout = payload.bundles.get(WORDS), payload.scalars.get(LAYOUT)
        wanted = torch.int32 if numbers.bits == 32 else torch.int64
        if set(payload.fields) != {WORDS, LAYOUT} or words is None or not isinstance(layout, str):
            raise PayloadError(f"a reply of {sorted(payload.fields)}, expected words to be summed and their layout")
        if set(words) != {WORDS} or words[WORDS].dtype != wanted or words[WORDS].ndim != 1 or not len(words[WORDS]):
            raise PayloadError(f"words to be summed are not one vector of {wanted}")
        return cls(words[WORDS].cpu().numpy().view(numbers.dtype), layout)

    def mean(self, by: str | None, clients: int, total: int, numbers: FixedPoint) -> tuple[Payload, int]:
        """The weighted mean, and the weight of all clients in it.

        Args:
            by, total, numbers: As for the replies.
            clients: Number of replies in the sum.

        Raises:
            PayloadError: words and layout do not match, or the weights are more than were asked for, or 0.
        """
        values, weight = self.words[:-1], int(self.words[-1])
        if not 0 < weight <= total or (by is None and weight != clients):
            raise PayloadError(f"weights of {clients} clients that sum to {weight}, of {total} that were asked")
        layout = json.loads(self.layout)
        sizes = [prod(shape) for _, _, _, entries in layout for _, _, shape in entries]
        if sum(sizes) != len(values):
            raise PayloadError(f"{len(values)} words, the layout has {sum(sizes)}")
        parts: Iterator[Any] = iter(np.split(values, np.cumsum(sizes)))
        share, fields = weight / total, dict[str, Any]()
        for field, name, attributes, entries in layout:
            tensors = {key: _tensor(next(parts), dtype, shape, share, numbers) for key, dtype, shape in entries}
            fields[field] = BUNDLE_KINDS[name](tensors=tensors, **attributes)
        return Payload(fields), weight


def _tensor(words: Residues, dtype: str, shape: list[int], share: float, numbers: FixedPoint) -> Tensor:
    wanted: torch.dtype = getattr(torch, dtype)
    like = np.dtype(np.float64 if wanted.is_floating_point else np.int64)
    values = torch.from_numpy(numbers.mean(words, share, like))
    return (values if wanted.is_floating_point else values.round()).to(wanted).reshape(shape)


def _array(values: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = (values.double() if values.is_floating_point() else values.long()).detach().cpu().numpy()
    return array
