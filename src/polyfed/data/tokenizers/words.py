"""A word-level vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from polyfed.data.tokenization import PAD, UNKNOWN, LearntTokenizer, Vocabulary, vocabulary_of_words, words_of


class Words(LearntTokenizer):
    """The most frequent words of the public texts, lower-cased; all others are ``<unk>``."""

    size: int = Field(default=10_000, ge=3, description="greatest number of tokens, <pad> and <unk> included")
    min_count: int = Field(default=2, ge=1, description="words that occur less often are left out")

    def learn(self, texts: Sequence[str]) -> tuple[str, ...]:
        counts = Counter(word for text in texts for word in words_of(text))
        # the same texts give the same ids, whatever the order of the texts
        frequent = [(-count, word) for word, count in counts.items() if count >= self.min_count]
        return PAD, UNKNOWN, *(word for _, word in sorted(frequent)[: self.size - 2])

    def build(self, tokens: tuple[str, ...]) -> Vocabulary:
        return vocabulary_of_words(tokens)
