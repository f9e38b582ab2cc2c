"""Tokenizers: how a text becomes a row of token ids, and where learnt vocabularies are kept."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar
from unicodedata import normalize

from polyfed.core.settings import Settings
from polyfed.data.arrow import fingerprint_of
from polyfed.data.learnt import learnt, public_column
from polyfed.data.source import Column
from polyfed.data.view import DataContext

if TYPE_CHECKING:
    import tokenizers

PAD, UNKNOWN = "<pad>", "<unk>"
NO_WORD = "\ufffd"
"""Stands for a text without words: no vocabulary has it, so it becomes ``<unk>``."""

Encode = Callable[[Sequence[str], int], list[list[int]]]

_SHORT = 8  # tokens that say how a text begins
_TEXTS = 8192  # texts that are encoded at a time


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer that is ready to use.

    Attributes:
        tokens: token strings by id.
        encode: texts and the greatest length -> token ids of each text, cut to that length.
        pad: id that fills up short texts.
        unknown: id that stands for what the vocabulary lacks.
        fixed: ids that are never dropped or deleted, such as marks of begin and end.
        pipeline: a tokenizer of the library ``tokenizers`` that gives the same ids; None where there can be none.
    """

    tokens: tuple[str, ...]
    encode: Encode
    pad: int = 0
    unknown: int = 1
    fixed: tuple[int, ...] = ()
    pipeline: tokenizers.Tokenizer | None = None

    @property
    def begins(self) -> bool:
        """Whether every text begins with a mark."""
        (ids,) = self.encode(["a text"], _SHORT)
        return len(ids) > 1 and ids[0] in self.fixed


class Tokenizer(Settings):
    """How texts become token ids. Subclasses live in ``polyfed.data.tokenizers``."""

    home: ClassVar[str] = "polyfed.data.tokenizers"

    @abstractmethod
    def load(self, modality: str, context: DataContext) -> Vocabulary:
        """Learn or read the vocabulary of a modality; ``ready`` does so once.

        Raises:
            ConfigError: what the vocabulary is made from (public texts, a file) is not there.
        """

    def ready(self, modality: str, context: DataContext) -> Vocabulary:
        """The vocabulary of a modality, from the memo of the context if it is there."""
        key = f"tokenizer:{self.key(modality, context)}"
        if key not in context.fitted:
            context.fitted[key] = self.load(modality, context)
        vocabulary = context.fitted[key]
        assert isinstance(vocabulary, Vocabulary)
        return vocabulary

    def key(self, modality: str, context: DataContext) -> str:
        """Changes whenever the vocabulary may: depends on the settings and on where files are looked up."""
        return fingerprint_of(json.dumps(self.model_dump(mode="json"), sort_keys=True), context.weights)


class LearntTokenizer(Tokenizer):
    """A tokenizer that learns its vocabulary from the public texts and keeps it in the run folder as JSON."""

    @abstractmethod
    def learn(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Token strings by id, ``<pad>`` and ``<unk>`` first; the same texts always give the same tokens."""

    @abstractmethod
    def build(self, tokens: tuple[str, ...]) -> Vocabulary:
        """The vocabulary of these tokens."""

    def load(self, modality: str, context: DataContext) -> Vocabulary:
        """Read the vocabulary from the run folder, or learn it and write it there."""
        column = self._public_texts(modality, context)
        return learnt(
            context,
            f"vocabulary-{self.component_name()}-{self.key(modality, context)}",
            lambda: {"settings": self.model_dump(mode="json"), "tokens": self.learn(column.texts())},
            lambda content: self.build(tuple(content["tokens"])),
        )

    def key(self, modality: str, context: DataContext) -> str:
        """Depends on the settings and on the public texts."""
        settings = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return fingerprint_of(settings, self._public_texts(modality, context).fingerprint)

    def _public_texts(self, modality: str, context: DataContext) -> Column:
        who = f"tokenizer '{self.component_name()}'"
        return public_column(context, modality, who, "use 'hashing' or 'pretrained'")


def words_of(text: str) -> list[str]:
    """Lower-cased runs of letters and digits, with their combining marks, composed (NFC); all else separates them.

    Signs that only say how to write, such as soft hyphens, are left out, and each Chinese character is a word. Scripts
    without spaces (Thai, Lao, Khmer) have no other words: ``wordpiece`` splits them.
    """
    if text.isascii():  # most texts, in a tenth of the time
        return re.findall(r"[^\W_]+", text.lower())
    words = word_splitter()
    return [word for word, _ in words.pre_tokenizer.pre_tokenize_str(words.normalizer.normalize_str(text))]


@cache
def word_splitter() -> tokenizers.Tokenizer:
    """What makes words of texts, with no vocabulary; Python's ``re`` knows no marks."""
    import tokenizers
    from tokenizers import Regex, normalizers

    letter = r"[\p{L}\p{N}\p{M}]"
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token=UNKNOWN))
    words.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(NO_WORD, " "),
            normalizers.NFC(),
            normalizers.Replace(Regex(rf"(?<={letter})[\p{{Cf}}&&[^\x{{200b}}]]+(?={letter})"), ""),
            normalizers.BertNormalizer(False, True, False, False),  # spaces around Chinese characters
            # the one letter whose lower case depends on its place, which the library's own rule leaves out
            normalizers.Replace(Regex(r"(?<=[\p{L}\p{M}])Σ(?!\p{L})"), "ς"),
            normalizers.Lowercase(),
            normalizers.NFC(),
        ]
    )
    pattern = Regex(rf"[\p{{L}}\p{{N}}]{letter}*|{NO_WORD}")
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "removed", invert=True)
    return words


def vocabulary_of_words(tokens: tuple[str, ...]) -> Vocabulary:
    """Whole words, which ``words_of`` finds, by their place among ``tokens``."""
    import tokenizers
    from tokenizers import normalizers

    ids = {normalize("NFC", token): number for number, token in reversed(list(enumerate(tokens)))}
    pipeline = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=UNKNOWN))
    wordless = normalizers.Replace(tokenizers.Regex(r"\A[^\p{L}\p{N}]*\z"), NO_WORD)
    pipeline.normalizer = normalizers.Sequence([word_splitter().normalizer, wordless])
    pipeline.pre_tokenizer = word_splitter().pre_tokenizer
    return Vocabulary(tokens, encoder(pipeline), pipeline=pipeline)


def encoder(pipeline: tokenizers.Tokenizer) -> Encode:
    """Encode texts by a tokenizer of the library."""

    def encode(texts: Sequence[str], length: int) -> list[list[int]]:
        pipeline.enable_truncation(length)
        # in parts: the library makes an object of a kilobyte of every text
        parts = (list(texts[start : start + _TEXTS]) for start in range(0, len(texts), _TEXTS))
        return [encoding.ids for part in parts for encoding in pipeline.encode_batch_fast(part)]

    return encode
