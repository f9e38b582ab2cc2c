"""A WordPiece vocabulary learnt from the public texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import tokenizers  # isort: skip
from pydantic import Field

from polyfed.data.tokenization import NO_WORD, PAD, UNKNOWN, LearntTokenizer, Vocabulary, encoder


class Wordpiece(LearntTokenizer):
    """Frequent pieces of words, lower-cased, without accents; words of other domains split into known pieces.

    Wu et al., "Google's Neural Machine Translation System", 2016; the pieces are learnt as in BERT.
    """

    size: int = Field(default=8000, ge=100, description="greatest number of tokens, <pad> and <unk> included")
    min_count: int = Field(default=2, ge=1, description="pairs of pieces that occur less often are not joined")

    def learn(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Pieces in the order in which they were learnt."""
        pipeline = _pipeline({UNKNOWN: 0})
        counts = Counter[str]()
        for text in texts:
            counts.update(pipeline.normalizer.normalize_str(text))
        frequent = sorted((-count, letter) for letter, count in counts.items() if not letter.isspace())
        letters = [letter for _, letter in frequent[: self.size // 4]]
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
        pipeline.train_from_iterator(texts, trainer)
        ids = pipeline.get_vocab()
        return tuple(sorted(ids, key=ids.__getitem__))

    def build(self, tokens: tuple[str, ...]) -> Vocabulary:
        pipeline = _pipeline({token: number for number, token in enumerate(tokens)})
        blank = tokenizers.normalizers.Replace(tokenizers.Regex(r"\A[\s\p{C}\x{fffd}]+\z"), " ")
        wordless = tokenizers.normalizers.Replace(tokenizers.Regex(r"\A\s*\z"), NO_WORD)
        # BERT's rules drop control characters, and nothing can be put in place of a text that has become empty
        pipeline.normalizer = tokenizers.normalizers.Sequence([blank, pipeline.normalizer, wordless])
        return Vocabulary(tokens, encoder(pipeline), pipeline=pipeline)


def _pipeline(ids: dict[str, int]) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token=UNKNOWN))
    pipeline.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return pipeline
