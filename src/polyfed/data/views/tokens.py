"""Texts as token ids."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64
from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.core.declarations import own_code
from polyfed.data.arrow import fingerprint_of
from polyfed.data.cache import cut_count, kept_numbers
from polyfed.data.samples import Inputs
from polyfed.data.source import Column, Count
from polyfed.data.tokenizers import Tokenizer, Vocabulary, Words
from polyfed.data.view import DataContext, InputSpec, View

_log = logging.getLogger(__name__)
_MANY = 0.5  # share of unknown words that is more than a remark
_FEW_CUT = 0.05  # share of tokens that is no more than a remark
_WHOLE = 1 << 20  # tokens, beyond every text
_LOOKED_AT = 1000  # texts, where not all become tokens ahead
_VERSION = 2  # raise when the same settings give other ids


class Tokens(View):
    """Token ids, int64 [b, longest text of the batch], padded; a text without tokens is one unknown.

    The training view may damage texts, as CreamFL does with 0.1 and 0.1: tokens become unknown, then some are
    deleted.
    """

    tokenizer: SerializeAsAny[Tokenizer] = Field(default=Words(), description="how texts become tokens")
    length: int = Field(default=32, ge=2, le=8192, description="greatest number of tokens; the rest is cut off")
    drop: float = Field(default=0.0, ge=0, lt=1, description="chance of a token to become unknown in training")
    delete: float = Field(default=0.0, ge=0, lt=1, description="share of the tokens then deleted, rounded down")

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """Open texts; they are tokenised once, for all runs of the machine.

        Raises:
            DataError: a value is no text, or the cache cannot be written.
        """
        vocabulary = self.tokenizer.ready(modality, context)
        if not context.ahead:
            return TokenRows(_Untokenised(vocabulary, column, self.length), vocabulary, self.drop, self.delete)
        key = f"tokens:{fingerprint_of(self.tokenizer.key(modality, context), self.length, column.fingerprint)}"
        if key not in context.fitted:
            path = context.cache / f"tokens-{self._stamp(vocabulary, column)}.npy"
            ids = kept_numbers(path, lambda: matrix_of(vocabulary, column.texts(), self.length).numpy())
            context.fitted[key] = torch.from_numpy(ids)
            _tell_unknown(torch.from_numpy(ids), vocabulary, column)
            if ids.shape[1] >= self.length:  # else nothing can have been cut
                _tell_cut(self.cut(column, modality, context), column)
        tokens = context.fitted[key]
        assert isinstance(tokens, Tensor)
        return TokenRows(tokens, vocabulary, self.drop, self.delete)

    def cut(self, column: Column, modality: str, context: DataContext) -> Count:
        """See ``View``; in tokens, marks of begin and end included."""
        vocabulary = self.tokenizer.ready(modality, context)

        def lengths() -> list[int]:
            return [len(row) for row in vocabulary.encode(column.texts(), _WHOLE)]

        return cut_count(f"tokens ({modality})", context, self._stamp(vocabulary, column), lengths, self.length)

    def _stamp(self, vocabulary: Vocabulary, column: Column) -> str:
        """Changes whenever the ids may: with the tokenizer, its code, what it has learnt or read, and the texts."""
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


def _tell_unknown(ids: Int32[Tensor, "n longest"], vocabulary: Vocabulary, column: Column) -> None:
    words = int((~torch.isin(ids, torch.tensor((vocabulary.pad, *vocabulary.fixed)))).sum())
    share = int((ids == vocabulary.unknown).sum()) / max(1, words)
    level = logging.WARNING if share > _MANY else logging.INFO
    _log.log(level, "%s: %.1f %% of its words are unknown to the tokenizer", column.where, 100 * share)


def _tell_cut(cut: Count, column: Column) -> None:
    for part in cut.left_out:
        level = logging.WARNING if part.count > _FEW_CUT * cut.found else logging.INFO
        _log.log(level, "%s: %s tokens %s; raise length of the view", column.where, f"{part.count:,}", part.reason)


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
    """Texts that become tokens whenever they are asked for."""

    vocabulary: Vocabulary
    column: Column
    length: int

    @cached_property
    def texts(self) -> list[str]:
        texts = self.column.texts()
        _tell_unknown(matrix_of(self.vocabulary, texts[:_LOOKED_AT], self.length), self.vocabulary, self.column)
        return texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, rows: Int64[Tensor, " b"]) -> Int32[Tensor, "b longest"]:
        return matrix_of(self.vocabulary, [self.texts[row] for row in rows.tolist()], self.length)


@dataclass(frozen=True)
class TokenRows:
    """Opened texts.

    Attributes:
        ids: token ids of all texts, padded.
        vocabulary: what they mean.
        drop: chance of a token to become unknown in the training view.
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
        """Id of the padding token, with which shorter batches are filled up."""
        return self.vocabulary.pad

    def __call__(
        self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None
    ) -> Int64[Tensor, "b longest"]:
        """Token ids of ``rows``, damaged if there is a generator."""
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
        # marks and padding get a lot above those of all words, so they are never among the first
        lots = torch.rand(ids.shape, generator=generator).masked_fill(~words, 2.0)
        rank = lots.argsort(1).argsort(1)
        gone = rank < (words.sum(1, keepdim=True).double() * self.delete).floor()
        # stable: what stays keeps its order, and gaps move to the end
        order = gone.long().argsort(dim=1, stable=True)
        return ids.masked_fill(gone, self.vocabulary.pad).gather(1, order)
