"""Columns of labels: class numbers, from numbers, booleans or names, each of which is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polyfed.core.errors import DataError
from polyfed.data.arrow import fingerprint_of, innermost, is_list, is_text
from polyfed.data.source import Column


def unless_blank(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(pc.equal(pc.utf8_trim_whitespace(texts), ""), pa.scalar(None, texts.type), texts)


def label_column(
    values: pa.ChunkedArray, names: tuple[str, ...], stamp: str, where: str, codes: Sequence[int] = ()
) -> Column:
    """Class numbers; each is checked, since a wrong one would only be found by a loss, on a GPU without a message.

    ``codes`` are what values hold in place of class numbers; empty: these.
    """
    kind = values.type
    encoded = is_text(kind) or bool(codes)
    if encoded:
        values = pc.index_in(values if codes else unless_blank(values), pa.array(codes or names, kind))
        stamp = fingerprint_of(stamp, *names)
    elif pa.types.is_boolean(innermost(kind)):
        numbers = pa.int8()
        while is_list(kind):
            numbers, kind = pa.list_(numbers), kind.value_type
        values = values.cast(numbers)
    flat, nulls = values, values.null_count
    while is_list(flat.type):
        flat = pc.list_flatten(flat)
        nulls += flat.null_count
    bounds = pc.min_max(flat).as_py()
    outside = names and bounds["min"] is not None and (bounds["min"] < 0 or bounds["max"] >= len(names))
    if nulls or outside:
        raise _bad_label(values, len(names), where)
    return Column(values, stamp, where, encoded=encoded)


def _bad_label(values: pa.ChunkedArray, classes: int, where: str) -> DataError:
    """Names the first label that is null or, where their number is known, none of the classes."""

    def bad(entry: Any) -> list[Any]:
        if isinstance(entry, list):
            return [label for part in entry for label in bad(part)]
        return [entry] if entry is None or (classes and not 0 <= entry < classes) else []

    row, label = next((row, labels[0]) for row, entry in enumerate(values.to_pylist()) if (labels := bad(entry)))
    valid = f"in 0 to {classes - 1}" if classes else "an integer"
    can_leave_out = label is None and not is_list(values.type)
    remedy = "mend or leave out the row" + (
        " (incomplete: leave_out), as polyfed prepare does" if can_leave_out else ""
    )
    return DataError(f"{where}, row {row}: label {label} is not {valid}; {remedy}")
