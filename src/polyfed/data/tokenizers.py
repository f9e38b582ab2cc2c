"""Tokenizers: words, hashes, word pieces, and those of word vectors and pretrained models."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unicodedata import normalize

from pydantic import Field

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.arrow import fingerprint_of
from polyfed.data.backbones import NO_CODE, NOT_ASKED
from polyfed.data.source import Column
from polyfed.data.view import DataContext, learnt, public_column

if TYPE_CHECKING:
    import tokenizers


PAD, UNKNOWN = "<pad>", "<unk>"
NO_WORD = "\ufffd"
"""Placeholder for a text without words: vocabularies lack it, so it becomes ``<unk>``."""

Encode = Callable[[Sequence[str], int], list[list[int]]]

_SHORT = 8  # tokens that show the beginning of a text
_TEXTS = 8192  # texts per call that encodes


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer that is ready to use.

    Attributes:
        tokens: token strings by id.
        encode: texts and the greatest length -> token ids of each text, cut to that length.
        pad: id of padding.
        unknown: id of words that the vocabulary lacks.
        fixed: ids that are never dropped or deleted, such as marks of begin and end.
        pipeline: equivalent tokenizer of the library ``tokenizers``; None if it has none.
    """

    tokens: tuple[str, ...]
    encode: Encode
    pad: int = 0
    unknown: int = 1
    fixed: tuple[int, ...] = ()
    pipeline: tokenizers.Tokenizer | None = None

    @property
    def begins(self) -> bool:
        """True if every text begins with a mark."""
        (ids,) = self.encode(["a text"], _SHORT)
        return len(ids) > 1 and ids[0] in self.fixed


class Tokenizer(Settings):
    """Conversion of texts to token ids. Subclasses live in ``polyfed.data.tokenizers``."""

    home: ClassVar[str] = "polyfed.data.tokenizers"

    @abstractmethod
    def load(self, modality: str, context: DataContext) -> Vocabulary:
        """Learn or read the vocabulary of a modality; ``ready`` does so once.

        Raises:
            ConfigError: the origin of the vocabulary (public texts, a file) is missing.
        """

    def ready(self, modality: str, context: DataContext) -> Vocabulary:
        """The vocabulary of a modality, loaded once and kept in the memo of the context."""
        return context.memo(f"tokenizer:{self.key(modality, context)}", lambda: self.load(modality, context))

    def key(self, modality: str, context: DataContext) -> str:
        """Digest of everything that the vocabulary depends on: settings and the folder of files."""
        return fingerprint_of(json.dumps(self.model_dump(mode="json"), sort_keys=True), context.weights)


class LearntTokenizer(Tokenizer):
    """A tokenizer that learns its vocabulary from the public texts and keeps it in the run folder as JSON."""

    @abstractmethod
    def learn(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Token strings by id, ``<pad>`` and ``<unk>`` first; the same for the same texts."""

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
        """Digest of the settings and the public texts."""
        settings = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return fingerprint_of(settings, self._public_texts(modality, context).fingerprint)

    def _public_texts(self, modality: str, context: DataContext) -> Column:
        who = f"tokenizer '{self.component_name()}'"
        return public_column(context, modality, who, "use 'hashing' or 'pretrained'")


def words_of(text: str) -> list[str]:
    """Lower-cased runs of letters and digits, with their combining marks, composed (NFC); all else separates them.

    Formatting characters, such as soft hyphens, are left out, and each Chinese character is a word. Scripts without
    spaces (Thai, Lao, Khmer) are not split: use ``wordpiece`` for them.
    """
    if text.isascii():  # most texts, in a tenth of the time
        return re.findall(r"[^\W_]+", text.lower())
    words = word_splitter()
    return [word for word, _ in words.pre_tokenizer.pre_tokenize_str(words.normalizer.normalize_str(text))]


@cache
def word_splitter() -> tokenizers.Tokenizer:
    """Splitter of texts into words, without a vocabulary; Python's ``re`` does not support combining marks."""
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
            # the one letter whose lower case depends on its position, which the library's own rule ignores
            normalizers.Replace(Regex(r"(?<=[\p{L}\p{M}])Σ(?!\p{L})"), "ς"),
            normalizers.Lowercase(),
            normalizers.NFC(),
        ]
    )
    pattern = Regex(rf"[\p{{L}}\p{{N}}]{letter}*|{NO_WORD}")
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "removed", invert=True)
    return words


def vocabulary_of_words(tokens: tuple[str, ...]) -> Vocabulary:
    """Vocabulary of words, split as by ``words_of``, with their positions among ``tokens`` as ids."""
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
        # in parts: the library makes an object of a kilobyte per text
        parts = (list(texts[start : start + _TEXTS]) for start in range(0, len(texts), _TEXTS))
        return [encoding.ids for part in parts for encoding in pipeline.encode_batch_fast(part)]

    return encode


class Words(LearntTokenizer):
    """The most frequent words of the public texts, lower-cased; other words are ``<unk>``."""

    short_name: ClassVar[str] = "words"

    size: int = Field(default=10_000, ge=3, description="greatest number of tokens, <pad> and <unk> included")
    min_count: int = Field(default=2, ge=1, description="words that occur less often are left out")

    def learn(self, texts: Sequence[str]) -> tuple[str, ...]:
        counts = Counter(word for text in texts for word in words_of(text))
        # the same texts give the same ids, whatever the order of the texts
        frequent = [(-count, word) for word, count in counts.items() if count >= self.min_count]
        return PAD, UNKNOWN, *(word for _, word in sorted(frequent)[: self.size - 2])

    def build(self, tokens: tuple[str, ...]) -> Vocabulary:
        return vocabulary_of_words(tokens)


class Hashing(Tokenizer):
    """Each lower-cased word goes into a bucket, the same one on every machine; words may share a bucket."""

    short_name: ClassVar[str] = "hashing"

    size: int = Field(default=8192, ge=3, le=2**20, description="number of ids, <pad> and <unk> included")

    def load(self, modality: str, context: DataContext) -> Vocabulary:
        """Buckets are named ``#2``, ``#3``, ..., after their ids."""

        @functools.cache
        def bucket(word: str) -> int:
            # Python's own hash of a text differs from process to process
            digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
            return 2 + int.from_bytes(digest, "big") % (self.size - 2)

        def encode(texts: Sequence[str], length: int) -> list[list[int]]:
            return [[bucket(word) for word in words_of(text)[:length]] for text in texts]

        return Vocabulary((PAD, UNKNOWN, *(f"#{number}" for number in range(2, self.size))), encode)


class Wordpiece(LearntTokenizer):
    """Frequent pieces of words, lower-cased, without the accents of Latin, Greek and Cyrillic letters.

    Words of other domains split into known pieces.

    Wu et al., "Google's Neural Machine Translation System", 2016; the pieces are learnt as in BERT.
    """

    short_name: ClassVar[str] = "wordpiece"

    size: int = Field(default=8000, ge=100, description="greatest number of tokens, <pad> and <unk> included")
    min_count: int = Field(default=2, ge=1, description="pairs of pieces that occur less often are not joined")

    def learn(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Pieces in the order in which they were learnt."""
        import tokenizers

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
        import tokenizers

        pipeline = _pipeline({token: number for number, token in enumerate(tokens)})
        blank = tokenizers.normalizers.Replace(tokenizers.Regex(r"\A[\s\p{C}\x{fffd}]+\z"), " ")
        wordless = tokenizers.normalizers.Replace(tokenizers.Regex(r"\A\s*\z"), NO_WORD)
        # BERT's rules drop control characters, and nothing can be put in place of a text that has become empty
        pipeline.normalizer = tokenizers.normalizers.Sequence([blank, pipeline.normalizer, wordless])
        return Vocabulary(tokens, encoder(pipeline), pipeline=pipeline)


def _pipeline(ids: dict[str, int]) -> tokenizers.Tokenizer:
    import tokenizers

    pipeline = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token=UNKNOWN))
    # BERT's own rule drops all marks, which in other scripts are vowels
    accents = tokenizers.normalizers.Replace(tokenizers.Regex(r"(?<=[\p{Latin}\p{Greek}\p{Cyrillic}])\p{Mn}+"), "")
    bert = tokenizers.normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    pipeline.normalizer = tokenizers.normalizers.Sequence([bert, tokenizers.normalizers.NFD(), accents])
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return pipeline


class Glove(Tokenizer):
    """Vocabulary of one or more folders with a ``words.txt`` (one word a line), first folder first.

    Pennington, Socher, Manning, "GloVe: Global Vectors for Word Representation", 2014.
    """

    short_name: ClassVar[str] = "glove"

    folders: tuple[str, ...] = Field(
        min_length=1, description="folders with words.txt, absolute or in the weights folder"
    )

    def load(self, modality: str, context: DataContext) -> Vocabulary:
        """Read the words; a word in several folders counts once."""
        words: list[str] = []
        for folder in self.folders:
            file = (context.weights or Path()) / folder / "words.txt"
            try:
                words += file.read_text(encoding="utf-8").split("\n")
            except (OSError, UnicodeDecodeError) as error:
                what = f"glove folder '{folder}': '{file}' cannot be read ({error}); "
                raise ConfigError(f"{what}correct the folder, or set data.weights_dir or POLYFED_WEIGHTS") from error
        return vocabulary_of_words(tuple(dict.fromkeys((PAD, UNKNOWN, *filter(None, words)))))


class PretrainedTokenizer(Tokenizer):
    """A Hugging Face tokenizer, from a local folder, a WordPiece ``vocab.txt``, or the hub.

    Its own marks of begin and end ([CLS], [SEP]) are put around each text and count towards the length.
    """

    short_name: ClassVar[str] = "pretrained"

    path: str = Field(description="folder or vocab.txt, absolute or in the weights folder; else a name on the hub")
    lowercase: bool = Field(default=True, description="lower-case texts; only for a bare vocab.txt")

    def load(self, modality: str, context: DataContext) -> Vocabulary:
        tokenizer = self.opened(context)
        missing = [mark for mark in ("pad", "unk") if getattr(tokenizer, f"{mark}_token_id") is None]
        if missing:
            raise ConfigError(f"tokenizer '{self.path}' has no {missing[0]} token; choose one that has")

        def encode(texts: Sequence[str], length: int) -> list[list[int]]:
            rows: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
            return rows

        ids: dict[str, int] = tokenizer.get_vocab()
        tokens = [""] * (max(ids.values()) + 1)  # some tokenizers leave ids out
        for token, number in ids.items():
            tokens[number] = token
        fixed = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
        return Vocabulary(
            tokens=tuple(tokens),
            encode=encode,
            pad=tokenizer.pad_token_id,
            unknown=tokenizer.unk_token_id,
            fixed=tuple(sorted(fixed)),
            pipeline=getattr(tokenizer, "backend_tokenizer", None),
        )

    def opened(self, context: DataContext) -> Any:
        """The tokenizer as ``transformers`` gives it."""
        import transformers  # takes seconds, and most runs do not need it
        from huggingface_hub import constants

        constants.HF_HUB_DISABLE_TELEMETRY = True
        local = (context.weights or Path()) / self.path
        words = local / "vocab.txt" if local.is_dir() else local
        try:
            # a bare vocab.txt is all that BERT's tokenizer needs, and AutoTokenizer does not open it
            if words.is_file() and not (words.parent / "tokenizer.json").exists():
                return transformers.BertTokenizer(vocab=str(words), do_lower_case=self.lowercase)
            name, own = (str(local) if local.exists() else self.path), local.exists() or not context.hub
            return transformers.AutoTokenizer.from_pretrained(name, local_files_only=own, **NO_CODE)
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).splitlines()[0] if context.hub else f"not {NOT_ASKED}"
            remedy = "correct it, or set data.weights_dir or POLYFED_WEIGHTS"
            where = f"neither from '{local}' nor the hub ({reason})"
            raise ConfigError(f"tokenizer '{self.path}' can be loaded {where}; {remedy}") from error
