"""Which rows of a table are items: those with the wanted values, and, where asked for, the complete ones."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from polyfed.core.errors import DataError, nearest
from polyfed.data.source import Selection, Value, is_list, is_text

Mask = npt.NDArray[np.bool_]

_SHOWN = 20  # values that an error lists at most: a column of ids has thousands


@dataclass(frozen=True)
class ColumnTable:
    """One split of a source as a table that is read column by column.

    Attributes:
        read: names of columns -> table with just these; no names -> a table that only has its number of rows.
        schema: schema of the table.
        names: column -> class names in label order, where it holds class numbers.
        place: path and split, for messages.
        everywhere: column -> its values in all splits of the source; None: only this split can be read.
        filled: whether a column is known, without reading it, to have no null.
    """

    read: Callable[[list[str]], pa.Table]
    schema: pa.Schema
    names: Mapping[str, tuple[str, ...]]
    place: str
    everywhere: Callable[[str], pa.ChunkedArray] | None = None
    filled: Callable[[str], bool] | None = None

    def column(self, name: str) -> pa.ChunkedArray:
        """All values of a column."""
        return self.read([name]).column(name)

    def kind(self, name: str) -> pa.DataType:
        """Type of a column."""
        return self.schema.field(name).type


@dataclass(frozen=True)
class Kept:
    """The rows that are items.

    Attributes:
        rows: true for each such row; None: all of them.
        left_out: see ``Split``.
    """

    rows: Mask | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    def of(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        """The values of the items."""
        return values if self.rows is None else values.filter(pa.array(self.rows))

    def stamp(self) -> tuple[str, ...]:
        """What a column's fingerprint depends on besides its content; the same rows, chosen otherwise, agree."""
        return () if self.rows is None else (hashlib.sha256(np.packbits(self.rows).tobytes()).hexdigest(),)


def kept_rows(table: ColumnTable, selection: Selection, modalities: Iterable[str], targets: Iterable[str]) -> Kept:
    """The rows of a table that are items; reads the columns that decide.

    Args:
        table: a split, whose columns have been found to exist.
        selection: what is asked for.
        modalities: columns that hold the modalities.
        targets: columns that hold the targets.

    Raises:
        DataError: a value does not fit its column or no item of the source has it, or no row is left.
    """
    if not selection.where and not selection.leave_out:
        return Kept()
    rows = np.ones(table.read([]).num_rows, np.bool_)
    for column, wanted in selection.where.items():
        rows &= _fitting(table, column, wanted)
    if not rows.any():
        wanted_all = ", ".join(f"{column}: {_written(values)}" for column, values in selection.where.items())
        raise DataError(f"{table.place}: none of {len(rows)} items fits where {{{wanted_all}}}; ask for less")
    left_out: dict[str, int] = {}
    if selection.leave_out:
        rows, left_out = _complete(table, rows, modalities, targets)
    return Kept(None if rows.all() else rows, left_out)


def lacking(values: pa.ChunkedArray) -> Mask:
    """True where an entry is null or a blank text, or a list that is empty or has such an entry.

    A struct, such as a picture, is null also where all its fields are.
    """
    kind = values.type
    if is_list(kind):
        return _lacking_lists(values)
    missing = _flags(values.is_null())
    if is_text(kind):
        missing |= _flags(pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True))
    elif pa.types.is_struct(kind) and kind.num_fields:
        missing |= np.logical_and.reduce([_flags(pc.struct_field(values, part.name).is_null()) for part in kind])
    return missing


def _lacking_lists(values: pa.ChunkedArray) -> Mask:
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
    missing: Mask = lengths == 0
    item = np.repeat(np.arange(len(lengths)), lengths)
    missing[item[lacking(pc.list_flatten(values))]] = True
    return missing


def _complete(
    table: ColumnTable, rows: Mask, modalities: Iterable[str], targets: Iterable[str]
) -> tuple[Mask, dict[str, int]]:
    single = [column for column in targets if not is_list(table.kind(column))]
    kept, left_out = rows.copy(), {}
    for column in dict.fromkeys((*modalities, *single)):
        missing = rows & _missing(table, column)
        if missing.any():
            left_out[column] = int(missing.sum())
            kept &= ~missing
    if not kept.any():
        counts = ", ".join(f"'{column}' ({count})" for column, count in left_out.items())
        raise DataError(f"{table.place}: all {rows.sum()} items are incomplete, they lack {counts}; name other columns")
    return kept, left_out


def _missing(table: ColumnTable, column: str) -> Mask:
    kind = table.kind(column)
    may_be_blank = is_text(kind) or is_list(kind)
    if not may_be_blank and table.filled is not None and table.filled(column):
        return np.zeros(table.read([]).num_rows, np.bool_)
    return lacking(table.column(column))


def _fitting(table: ColumnTable, column: str, wanted: Sequence[Value]) -> Mask:
    """Which rows have one of the values."""
    numbers = [_stored(table, column, value) for value in wanted]
    values = _comparable(table.column(column))
    there = set(values.unique().to_pylist())
    for value, number in zip(wanted, numbers, strict=True):
        if number not in there:
            _require_elsewhere(table, column, value, number, there)
    return _flags(pc.is_in(values, value_set=pa.array(numbers, values.type)))


def _stored(table: ColumnTable, column: str, value: Value) -> Value:
    """A value as it stands in the column: the number of a class that is given by its name."""
    kind, names = table.kind(column), table.names.get(column, ())
    fits = {bool: pa.types.is_boolean, int: pa.types.is_integer, str: is_text}[type(value)]
    if fits(kind):
        return value
    if isinstance(value, str) and names and pa.types.is_integer(kind):
        if value not in names:
            raise DataError(f"{table.place}, where.{column}: no class '{value}'; {nearest(value, names)}")
        return names.index(value)
    given = str(value).lower() if isinstance(value, bool) else repr(value)
    known = next((word for test, word in _KINDS if test(kind)), None)
    remedy = f"give {known}" if known else "name a column of booleans, integers or texts"
    raise DataError(f"{table.place}, where.{column}: the column holds {kind}, which {given} is not; {remedy}")


_KINDS = (
    (pa.types.is_boolean, "true or false"),
    (pa.types.is_integer, "an integer (or, where the column has class names, one of these)"),
    (is_text, "a text (in quotes if it looks like a number)"),
)


def _require_elsewhere(table: ColumnTable, column: str, value: Value, number: Value, there: set[Any]) -> None:
    """A value that this split happens to lack is fine if another split has it; otherwise it is a mistake."""
    present = there
    if table.everywhere is not None:
        present = set(_comparable(table.everywhere(column)).unique().to_pylist())
    if number not in present:
        names = table.names.get(column, ())
        words = sorted(str(names[entry] if names else entry) for entry in present - {None})
        close = difflib.get_close_matches(str(value), words, n=_SHOWN) or words[:_SHOWN]
        hint = nearest(str(value), words if len(words) <= _SHOWN else close)
        raise DataError(f"{table.place}, where.{column}: no item has {value!r}; {hint}")


def _comparable(values: pa.ChunkedArray) -> pa.ChunkedArray:
    return values.cast(pa.int64()) if pa.types.is_integer(values.type) else values


def _flags(values: pa.ChunkedArray) -> Mask:
    flags: Mask = values.to_numpy().astype(np.bool_)
    return flags


def _written(values: Sequence[Value]) -> str:
    return " or ".join(map(repr, values))
