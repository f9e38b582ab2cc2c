"""Which items have a text with one of some words."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pyarrow as pa
import torch
from jaxtyping import Bool
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.data.source import Column


def mentioning(column: Column, words: Iterable[str]) -> Bool[Tensor, " n"]:
    """True for each item of which a text has one of the words as a whole word, singular or plural, in any case.

    Underscores in words stand for spaces, as in names of classes. Without words nothing is mentioned.

    Raises:
        ConfigError: the column holds no texts, or a word is blank.
    """
    values = column.values
    kind = values.type.value_type if column.nested else values.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ConfigError(f"public.without looks for words in texts, but {column.where} holds {kind}; name another one")
    forms = _forms(words)
    if not forms:
        return torch.zeros(len(values), dtype=torch.bool)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, forms))})(?:s|es)?(?!\w)")
    found = [_any(pattern, item if column.nested else [item]) for item in values.to_pylist()]
    return torch.tensor(found, dtype=torch.bool)


def _forms(words: Iterable[str]) -> list[str]:
    forms = sorted({word.replace("_", " ").strip().lower() for word in words})
    if "" in forms:  # it would be found next to every mark
        raise ConfigError("public.without has a blank word; leave it out")
    return forms


def _any(pattern: re.Pattern[str], texts: Iterable[str | None] | None) -> bool:
    return any(pattern.search(text.lower()) for text in texts or () if text)
