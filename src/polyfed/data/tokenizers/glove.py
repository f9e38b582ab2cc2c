"""The words of GloVe vectors."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from polyfed.core.errors import ConfigError
from polyfed.data.tokenization import PAD, UNKNOWN, Tokenizer, Vocabulary, vocabulary_of_words
from polyfed.data.view import DataContext


class Glove(Tokenizer):
    """Vocabulary of one or more folders with a ``words.txt`` (one word a line), first folder first.

    Pennington, Socher, Manning, "GloVe: Global Vectors for Word Representation", 2014.
    """

    folders: tuple[str, ...] = Field(
        min_length=1, description="folders with words.txt: absolute, or relative to the weights folder"
    )

    def load(self, modality: str, context: DataContext) -> Vocabulary:
        """Read the words; a word in several folders counts once."""
        words: list[str] = []
        for folder in self.folders:
            file = (context.weights or Path()) / folder / "words.txt"
            try:
                words += file.read_text(encoding="utf-8").split("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"glove folder '{folder}': '{file}' cannot be read ({error}); "
                    "correct the folder, or set data.weights_dir or POLYFED_WEIGHTS"
                ) from error
        return vocabulary_of_words(tuple(dict.fromkeys((PAD, UNKNOWN, *filter(None, words)))))
