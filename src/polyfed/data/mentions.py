"""Which items have a text with one of some words."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from jaxtyping import Bool
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.data.arrow import innermost, is_text
from polyfed.data.source import Column


def mentioning(column: Column, words: Iterable[str]) -> Bool[Tensor, " n"]:
    """True for each item of which a text has one of the words as a whole word, singular or plural, in any case.

    Underscores in words stand for spaces, as in names of classes. Without words nothing is mentioned.

    Raises:
        ConfigError: the column holds no texts, or a word is blank.
    """
    kind = innermost(column.values.type)
    if not is_text(kind):
        raise ConfigError(f"public.without looks for words in texts, but {column.where} holds {kind}; name another one")
    forms = sorted({word.replace("_", " ").strip().lower() for word in words})
    if "" in forms:  # it would be found next to every mark
        raise ConfigError("public.without has a blank word; leave it out")
    items = column.values.to_pylist()
    if not forms:
        return torch.zeros(len(items), dtype=torch.bool)
    # not \b, which would never match beside a word that ends in a mark, such as "c++"
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, forms))})(?:s|es)?(?!\w)")
    lists = items if column.nested else [[item] for item in items]
    return torch.tensor([_any(pattern, texts or ()) for texts in lists], dtype=torch.bool)


def _any(pattern: re.Pattern[str], texts: Iterable[str | None]) -> bool:
    return any(pattern.search(text.lower()) for text in texts if text)
