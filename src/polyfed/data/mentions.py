"""Which items have a text with one of some words."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pyarrow as pa
import torch
from jaxtyping import Bool
from torch import Tensor

from polyfed.data.source import Column
from polyfed.errors import ConfigError


def mentioning(column: Column, words: Iterable[str]) -> Bool[Tensor, " n"]:
    """True for each item of which a text has one of the words as a whole word, singular or plural, in any case.

    Underscores in words stand for spaces, as in names of classes.

    Raises:
        ConfigError: the column holds no texts.
    """
    values = column.values
    kind = values.type.value_type if column.nested else values.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ConfigError(f"public.without looks for words in texts, but {column.where} holds {kind}; name another one")
    pattern = _pattern(words)
    found = [_any(pattern, item if column.nested else [item]) for item in values.to_pylist()]
    return torch.tensor(found, dtype=torch.bool)


def _pattern(words: Iterable[str]) -> re.Pattern[str]:
    forms = sorted({re.escape(word.replace("_", " ").strip().lower()) for word in words})
    return re.compile(rf"(?<!\w)(?:{'|'.join(forms)})(?:s|es)?(?!\w)")


def _any(pattern: re.Pattern[str], texts: Iterable[str | None] | None) -> bool:
    return any(pattern.search(text.lower()) for text in texts or () if text)
