"""A WordPiece vocabulary learnt from the public texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import tokenizers  # isort: skip
from pydantic import Field

from polyfed.data.tokenization import PAD, UNKNOWN, LearntTokenizer, Vocabulary


class Wordpiece(LearntTokenizer):
    """Frequent pieces of words, lower-cased, without accents; words of other domains split into known pieces.

    Wu et al., "Google's Neural Machine Translation System", 2016; the pieces are learnt as in BERT.
    """

    size: int = Field(default=8000, ge=100, description="greatest number of tokens, <pad> and <unk> included")
    min_count: int = Field(default=2, ge=1, description="pairs of pieces that occur less often are not joined")

    def learn(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Pieces in the order in which they were learnt."""
        tokenizer = _tokenizer({UNKNOWN: 0})
        letters = _letters(tokenizer, texts, most=self.size // 4)
        trainer = tokenizers.trainers.WordPieceTrainer(
            vocab_size=self.size,
            min_frequency=self.min_count,
            # The trainer numbers continuations in the order of a hash table, which differs from run to run,
            # and breaks ties between pairs by these numbers; so all letters get their numbers from here.
            special_tokens=[PAD, UNKNOWN, *letters, *(f"##{letter}" for letter in letters)],
            initial_alphabet=letters,
            limit_alphabet=len(letters),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        ids = tokenizer.get_vocab()
        return tuple(sorted(ids, key=ids.__getitem__))

    def build(self, tokens: tuple[str, ...]) -> Vocabulary:
        """Greedy longest-match splitting."""
        tokenizer = _tokenizer({token: number for number, token in enumerate(tokens)})

        def encode(texts: Sequence[str], length: int) -> list[list[int]]:
            tokenizer.enable_truncation(length)
            return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]

        return Vocabulary(tokens, encode)


def _tokenizer(ids: dict[str, int]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _letters(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], most: int) -> list[str]:
    """The most frequent letters, in a fixed order."""
    counts = Counter[str]()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    frequent = sorted((-count, letter) for letter, count in counts.items() if not letter.isspace())
    return [letter for _, letter in frequent[:most]]
