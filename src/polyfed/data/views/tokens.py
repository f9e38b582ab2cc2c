"""Texts as token ids."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int32, Int64
from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.core.declarations import own_code
from polyfed.data.arrow import fingerprint_of
from polyfed.data.cache import cut_count, kept_numbers
from polyfed.data.samples import Inputs, Rows, Stream
from polyfed.data.source import Column, Count
from polyfed.data.tokenizers import Tokenizer, Vocabulary, Words
from polyfed.data.view import DataContext, InputSpec, View

_log = logging.getLogger(__name__)
_MANY = 0.5  # share of unknown words above which a note is a warning
_FEW_CUT = 0.05  # share of tokens up to which a note is not a warning
_UNCUT = 1 << 20  # tokens, longer than any text
_LOOKED_AT = 1000  # texts, if not all are tokenised ahead
_VERSION = 2  # raise when the same settings give other ids


class Tokens(View):
    """Token ids, int64 [b, longest text of the batch], padded; a text without tokens becomes one unknown.

    The training view can corrupt texts, as in CreamFL with 0.1 and 0.1: tokens become unknown, then some are deleted.
    """

    tokenizer: SerializeAsAny[Tokenizer] = Field(default=Words(), description="tokenizer of the texts")
    length: int = Field(default=32, ge=2, le=8192, description="greatest number of tokens; longer texts are cut")
    drop: float = Field(default=0.0, ge=0, lt=1, description="probability that a token becomes unknown in training")
    delete: float = Field(default=0.0, ge=0, lt=1, description="share of the tokens then deleted, rounded down")

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """Open texts, which are tokenised once for all runs of the machine.

        Raises:
            DataError: a value is not a text, or the cache cannot be written.
        """
        vocabulary = self.tokenizer.ready(modality, context)
        if not context.ahead:
            return TokenRows(_Untokenised(vocabulary, column, self.length), vocabulary, self.drop, self.delete)
        key = f"tokens:{fingerprint_of(self.tokenizer.key(modality, context), self.length, column.fingerprint)}"

        def tokenise() -> Tensor:
            path = context.cache / f"tokens-{self._stamp(vocabulary, column)}.npy"
            numbers = kept_numbers(path, lambda: matrix_of(vocabulary, column.texts(), self.length).numpy())
            _log_unknown(ids := torch.from_numpy(numbers), vocabulary, column)
            cut = self.cut(column, modality, context) if ids.shape[1] >= self.length else None  # else no text was cut
            for part in cut.left_out if cut else ():
                level = logging.WARNING if cut and part.count > _FEW_CUT * cut.total else logging.INFO
                reason = f"{part.count:,} tokens {part.reason}; raise length of the view"
                _log.log(level, "%s: %s", column.where, reason)
            return ids

        return TokenRows(context.memo(key, tokenise), vocabulary, self.drop, self.delete)

    def cut(self, column: Column, modality: str, context: DataContext) -> Count:
        """See ``View``; counts tokens, including marks of begin and end."""
        vocabulary = self.tokenizer.ready(modality, context)

        def lengths() -> list[int]:
            return [len(row) for row in vocabulary.encode(column.texts(), _UNCUT)]

        return cut_count(f"tokens ({modality})", context, self._stamp(vocabulary, column), lengths, self.length)

    def _stamp(self, vocabulary: Vocabulary, column: Column) -> str:
        """Digest of everything that determines the ids: tokenizer, its code, its vocabulary, and the texts."""
        settings, code = self.tokenizer.model_dump_json(), own_code(self.tokenizer)
        learnt = vocabulary.tokens
        if (pipeline := vocabulary.pipeline) is not None:
            pipeline.no_truncation()  # set by every call that encodes
            learnt = (pipeline.to_str(),)
        versions = _VERSION, metadata.version("tokenizers"), self.length, vocabulary.pad, vocabulary.unknown
        return fingerprint_of(*versions, settings, code, *learnt, column.fingerprint)

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        vocabulary = self.tokenizer.ready(modality, context)
        return InputSpec((self.length,), vocabulary.tokens, vocabulary.pad, vocabulary.begins)


def _log_unknown(ids: Int32[Tensor, "n longest"], vocabulary: Vocabulary, column: Column) -> None:
    words = int((~torch.isin(ids, torch.tensor((vocabulary.pad, *vocabulary.fixed)))).sum())
    share = int((ids == vocabulary.unknown).sum()) / max(1, words)
    level = logging.WARNING if share > _MANY else logging.INFO
    _log.log(level, "%s: %.1f %% of its words are unknown to the tokenizer", column.where, 100 * share)


def matrix_of(vocabulary: Vocabulary, texts: Sequence[str], length: int) -> Int32[Tensor, "n longest"]:
    """Token ids of each text, cut at ``length``, padded to the longest; one unknown for an empty text."""
    rows = [row or [vocabulary.unknown] for row in vocabulary.encode(texts, length)]
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    matrix = np.full((len(rows), int(lengths.max(initial=1))), vocabulary.pad, dtype=np.int32)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = np.fromiter(
        itertools.chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum())
    )
    return torch.from_numpy(matrix)


@dataclass(frozen=True)
class _Untokenised:
    """Texts that are tokenised at each use."""

    vocabulary: Vocabulary
    column: Column
    length: int

    @cached_property
    def noted(self) -> None:
        _log_unknown(self._ids(np.arange(min(_LOOKED_AT, len(self)))), self.vocabulary, self.column)

    def __len__(self) -> int:
        return int(self.column.lengths.sum())

    def __getitem__(self, rows: Int64[Tensor, " b"]) -> Int32[Tensor, "b longest"]:
        _ = self.noted
        return self._ids(rows.numpy())

    def _ids(self, rows: npt.NDArray[np.int64]) -> Int32[Tensor, "b longest"]:
        return matrix_of(self.vocabulary, self.column.texts(rows), self.length)


@dataclass(frozen=True)
class TokenRows:
    """Opened texts.

    Attributes:
        ids: token ids of all texts, padded.
        vocabulary: Meaning of the ids.
        drop: Probability that a token becomes unknown in the training view.
        delete: share of the tokens deleted in the training view.
    """

    ids: Int32[Tensor, "n longest"] | _Untokenised
    vocabulary: Vocabulary
    drop: float = 0.0
    delete: float = 0.0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def pad(self) -> int:
        """Id of the padding token."""
        return self.vocabulary.pad

    def __call__(self, rows: Rows, generator: Stream = None) -> Int64[Tensor, "b longest"]:
        """Token ids of ``rows``, corrupted with a generator."""
        ids = self.ids[rows].long()
        if generator is not None and self.drop:
            chosen = torch.rand(ids.shape, generator=generator) < self.drop
            ids = ids.masked_fill(chosen & self._words(ids), self.vocabulary.unknown)
        if generator is not None and self.delete:
            ids = self._deleted(ids, generator)
        # rows are stored at the length of the longest text of the column
        used = (ids != self.vocabulary.pad).any(0) * torch.arange(1, ids.shape[1] + 1)
        return ids[:, : max(1, int(used.max()))]

    def _words(self, ids: Int64[Tensor, "b l"]) -> Bool[Tensor, "b l"]:
        spared = torch.tensor((self.vocabulary.pad, *self.vocabulary.fixed))
        return ~torch.isin(ids, spared)

    def _deleted(self, ids: Int64[Tensor, "b l"], generator: torch.Generator) -> Int64[Tensor, "b l"]:
        """Delete floor(share x words) words of each text, which ones at random, and close the gaps."""
        words = self._words(ids)
        # marks and padding sort after all words
        lots = torch.rand(ids.shape, generator=generator).masked_fill(~words, 2.0)
        rank = lots.argsort(1).argsort(1)
        gone = rank < (words.sum(1, keepdim=True).double() * self.delete).floor()
        # stable: remaining tokens keep their order, and gaps move to the end
        order = gone.long().argsort(dim=1, stable=True)
        return ids.masked_fill(gone, self.vocabulary.pad).gather(1, order)
