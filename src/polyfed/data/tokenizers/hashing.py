"""Words hashed into buckets: a vocabulary that needs no data."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from pydantic import Field

from polyfed.data.tokenization import PAD, UNKNOWN, Tokenizer, Vocabulary, words_of
from polyfed.data.view import DataContext


class Hashing(Tokenizer):
    """Each lower-cased word goes into a bucket, the same one on every machine; words may share a bucket."""

    size: int = Field(default=8192, ge=3, le=2**20, description="number of ids, <pad> and <unk> included")

    def load(self, modality: str, context: DataContext) -> Vocabulary:
        """Buckets are called ``#2``, ``#3``, ...: like their ids."""

        @functools.cache
        def bucket(word: str) -> int:
            # Python's own hash of a text differs from process to process
            digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
            return 2 + int.from_bytes(digest, "big") % (self.size - 2)

        def encode(texts: Sequence[str], length: int) -> list[list[int]]:
            return [[bucket(word) for word in words_of(text)[:length]] for text in texts]

        return Vocabulary((PAD, UNKNOWN, *(f"#{number}" for number in range(2, self.size))), encode)
