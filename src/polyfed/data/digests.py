"""Digests of what columns hold, equal wherever the same content lies: pictures as encoded bytes, texts as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.arrow import fingerprint_of
from polyfed.data.cache import remembered
from polyfed.data.images import picture_bytes
from polyfed.data.source import Column, Split
from polyfed.data.view import DataContext

_VERSION = 1  # raise when the same content gives another digest
_CHUNK = 512  # items read at a time: bounds memory
_BYTES = 16


def content_digests(split: Split, items: Int64[Tensor, " n"], context: DataContext) -> list[str]:
    """Names and digests of what some items of a split are in all its modalities; see ``content_digest``."""
    return [f"{name} {content_digest(split.modality(name), context, items)}" for name in sorted(split.columns)]


def content_digest(column: Column, context: DataContext, items: Int64[Tensor, " n"] | None = None) -> str:
    """A digest of some items of a column, or of all, computed once and kept in the cache.

    A generated column is known by its recipe: encoders of other versions write the same pixels as other bytes.

    Raises:
        DataError: a picture cannot be read (names row and path), or the cache cannot be written.
    """
    chosen = "all" if items is None else hashlib.sha256(items.numpy().tobytes()).hexdigest()
    # as a digest of pixels would need all pictures to be drawn
    if column.recipe:
        return fingerprint_of(column.recipe, chosen)
    path = context.cache / f"content-{fingerprint_of(_VERSION, column.fingerprint, chosen)}.json"

    def compute() -> list[int]:
        digest, values = hashlib.blake2b(digest_size=_BYTES), column.values
        chosen = torch.arange(len(values)) if items is None else items
        for start in range(0, len(chosen), _CHUNK):
            rows = chosen[start : start + _CHUNK].numpy()
            for row, value in zip(rows.tolist(), values.take(pa.array(rows)).to_pylist(), strict=True):
                try:
                    for part in _parts(value, column, context.pixels):
                        digest.update(part)
                except (OSError, ValueError) as error:
                    raise DataError(f"{column.where}, row {row}: {error}; mend or leave out the row") from error
        return list(digest.digest())

    return bytes(remembered(path, compute)).hex()


def _parts(value: Any, column: Column, pixels: int) -> Iterator[bytes]:
    """The value as bytes that no other value has."""
    if isinstance(value, dict) and not value.keys() - {"bytes", "path"}:
        value = picture_bytes(value, column.folder, pixels)
    if isinstance(value, dict):
        value = [entry for item in sorted(value.items()) for entry in item]
    if isinstance(value, list):
        # lengths stand before contents, so that ["ab", "c"] and ["a", "bc"] differ
        yield b"list %d " % len(value)
        for entry in value:
            yield from _parts(entry, column, pixels)
    else:
        content = value if isinstance(value, bytes) else str(value).encode()
        yield b"%s %d " % (type(value).__name__.encode(), len(content))
        yield content
