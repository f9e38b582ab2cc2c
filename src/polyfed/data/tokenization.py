"""Tokenizers: how a text becomes a row of token ids, and where learnt vocabularies are kept."""

from __future__ import annotations

import json
import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.settings import Component
from polyfed.core.untrusted import file_json
from polyfed.data.arrow import fingerprint_of, flat_values
from polyfed.data.source import Column
from polyfed.data.view import DataContext

PAD, UNKNOWN = "<pad>", "<unk>"

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer that is ready to use.

    Attributes:
        tokens: token strings by id.
        encode: texts and the greatest length -> token ids of each text, cut to that length.
        pad: id that fills up short texts.
        unknown: id that stands for what the vocabulary lacks.
        fixed: ids that are never dropped or deleted, such as marks of begin and end.
    """

    tokens: tuple[str, ...]
    encode: Callable[[Sequence[str], int], list[list[int]]]
    pad: int = 0
    unknown: int = 1
    fixed: tuple[int, ...] = ()


class Tokenizer(Component):
    """How texts become token ids. Subclasses live in ``polyfed.data.tokenizers``, one a module."""

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
        found = context.fitted[key]
        assert isinstance(found, Vocabulary)
        return found

    def key(self, modality: str, context: DataContext) -> str:
        """Changes whenever the vocabulary may: depends on the settings and on where files are looked up."""
        settings = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return fingerprint_of(settings, context.weights)


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
        if context.bundles is None:
            return self.build(self.learn(texts_of(column)))
        name = f"vocabulary-{self.component_name()}-{self.key(modality, context)}.json"
        path = context.bundles / name
        if not path.exists():
            _write(path, {"settings": self.model_dump(mode="json"), "tokens": self.learn(texts_of(column))})
        return self.build(_read_tokens(path))

    def key(self, modality: str, context: DataContext) -> str:
        """Depends on the settings and on the public texts."""
        settings = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return fingerprint_of(settings, self._public_texts(modality, context).fingerprint)

    def _public_texts(self, modality: str, context: DataContext) -> Column:
        if modality not in context.public:
            raise ConfigError(
                f"tokenizer '{self.component_name()}' learns from the public set, which has no '{modality}' "
                f"(it has: {', '.join(context.public) or 'nothing'}); use 'hashing' or 'pretrained', "
                "or add a public set with it"
            )
        return context.public[modality]


def texts_of(column: Column) -> list[str]:
    """All texts of a column, those of nested columns in item order.

    Raises:
        DataError: a value is missing or not a text.
    """
    values = flat_values(column)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise DataError(f"{column.where}: holds {values.type}, not texts; name a column of strings")
    texts: list[str] = values.to_pylist()
    return texts


def words_of(text: str) -> list[str]:
    """Lower-cased runs of letters and digits; all else separates them."""
    return _WORD.findall(text.lower())


def word_encoder(ids: Mapping[str, int], unknown: int = 1) -> Callable[[Sequence[str], int], list[list[int]]]:
    """Encode each word as its id, and as ``unknown`` if it has none."""

    def encode(texts: Sequence[str], length: int) -> list[list[int]]:
        return [[ids.get(word, unknown) for word in words_of(text)[:length]] for text in texts]

    return encode


def _write(path: Path, content: object) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_tokens(path: Path) -> tuple[str, ...]:
    try:
        tokens = file_json(path.read_text(encoding="utf-8"))["tokens"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a readable vocabulary ({error}); remove the file to learn it again") from error
    return tuple(tokens)
