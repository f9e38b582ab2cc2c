"""Splits made of Arrow tables: what Parquet files, hub data sets and generated tables have in common."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polyfed.data.source import Column, Split
from polyfed.errors import DataError, nearest


class LazyColumn(Column):
    """A column whose values are read at first use: what is in a cache is never read again.

    Args:
        values: the values, or a call that reads them.
        fingerprint: see Column.
        where: see Column.
        nested: whether an item holds a list of values; None reads it off the values.
    """

    def __init__(
        self,
        values: pa.ChunkedArray | Callable[[], pa.ChunkedArray],
        fingerprint: str,
        where: str,
        nested: bool | None = None,
    ) -> None:
        # the base class is frozen, and its `values` is a property here
        vars(self).update(fingerprint=fingerprint, where=where, _held=values, _nested=nested)

    @property
    def values(self) -> pa.ChunkedArray:
        """The values, read once."""
        held = vars(self)
        if callable(held["_held"]):
            held["_held"] = held["_held"]()
        return held["_held"]

    @property
    def nested(self) -> bool:
        """Whether an item holds a list of values."""
        known: bool | None = vars(self)["_nested"]
        return super().nested if known is None else known


def split_of_table(
    read: Callable[[list[str]], pa.Table],
    schema: pa.Schema,
    *,
    source: str,
    split: str,
    ids_column: str | None,
    columns: Mapping[str, str],
    targets: Mapping[str, str],
    fingerprint: str,
    where: str,
) -> Split:
    """A split over a table that can be read column by column.

    Args:
        read: names of columns -> table with just these; no names -> a table that only has its number of rows.
        schema: schema of the table; class names come from its Hugging Face metadata.
        source: name of the source in the configuration.
        split: name of the split.
        ids_column: column of strings or integers, unique; None makes ids ``<where>/<split>:<row>``.
        columns: modality -> column name.
        targets: target name -> column name; integers, or (nested) lists of integers.
        fingerprint: changes whenever the content may have changed.
        where: path or name of the data as the user gave it, for messages and ids.

    Raises:
        DataError: a named column is missing, a target is not integer, an id is missing or not unique.
    """
    place = f"{where}/{split}"
    for use, column in _uses(ids_column, columns, targets):
        _require(schema, column, f"{place} (source '{source}', {use})")
    names = class_names(schema)
    classes = {target: names[column] for target, column in targets.items() if column in names}
    wanted = {column: len(classes.get(target, ())) for target, column in targets.items()}
    for target, column in targets.items():
        _require_integers(schema.field(column).type, f"{place}, target '{target}', column '{column}'")

    def open_column(name: str) -> Column:
        _require(schema, name, place)
        here = f"{place}, column '{name}'"
        stamp = fingerprint_of(fingerprint, split, name)
        if name in wanted:
            return Column(_checked_labels(read([name]).column(name), wanted[name], here), stamp, here)
        return LazyColumn(lambda: read([name]).column(name), stamp, here, is_list(schema.field(name).type))

    ids = _ids(read, ids_column, place)
    return Split(source, split, ids, dict(columns), dict(targets), classes, open_column)


def fingerprint_of(*parts: object) -> str:
    """16 hexadecimal digits that depend on every part and on their order."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:16]


def is_list(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a list of any sort."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def flattened(column: Column) -> pa.ChunkedArray:
    """The values of a column, those of a nested column one after the other in item order.

    Raises:
        DataError: a value, or a list of values, is null; the message names its row.
    """
    values = column.values
    if values.null_count:
        row = pc.index(values.is_null(), True).as_py()
        raise DataError(f"{column.where}, row {row}: no value; fill it or leave out the row")
    if not column.nested:
        return values
    flat = pc.list_flatten(values)
    if flat.null_count:
        place = place_of(column, pc.index(flat.is_null(), True).as_py())
        raise DataError(f"{place}: no value; fill it or leave it out of the list")
    return flat


def place_of(column: Column, row: int) -> str:
    """Where value ``row`` of the flattened column stands, for error messages."""
    if not column.nested:
        return f"{column.where}, row {row}"
    ends = np.cumsum(pc.list_value_length(column.values).to_numpy())
    item = int(np.searchsorted(ends, row, side="right"))
    entry = row - (int(ends[item - 1]) if item else 0)
    return f"{column.where}, row {item}, entry {entry}"


def class_names(schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """Column name -> class names in label order, from the Hugging Face metadata (ClassLabel features)."""
    raw = (schema.metadata or {}).get(b"huggingface")
    if raw is None:
        return {}
    features = json.loads(raw).get("info", {}).get("features", {})
    found = {column: _labels_of(feature) for column, feature in features.items()}
    return {column: tuple(names) for column, names in found.items() if names}


def _labels_of(feature: Any) -> Sequence[str]:
    if isinstance(feature, list):
        return _labels_of(feature[0]) if feature else ()
    if not isinstance(feature, dict):
        return ()
    if feature.get("_type") == "ClassLabel":
        return feature.get("names") or ()
    return _labels_of(feature.get("feature"))


def _uses(ids_column: str | None, columns: Mapping[str, str], targets: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if ids_column is not None:
        yield "id", ids_column
    for modality, column in columns.items():
        yield f"columns.{modality}", column
    for target, column in targets.items():
        yield f"targets.{target}", column


def _require(schema: pa.Schema, column: str, place: str) -> None:
    if column not in schema.names:
        raise DataError(f"{place}: no column '{column}'; {nearest(column, schema.names)}")


def _require_integers(kind: pa.DataType, place: str) -> None:
    inner = kind
    while is_list(inner):
        inner = inner.value_type
    if not pa.types.is_integer(inner):
        raise DataError(f"{place}: a target needs integers or lists of integers, not {kind}; use class numbers")


def _checked_labels(values: pa.ChunkedArray, classes: int, where: str) -> pa.ChunkedArray:
    """The values, if none is null and all are below the number of classes (0: not known)."""
    flat, nulls = values, values.null_count
    while is_list(flat.type):
        flat = pc.list_flatten(flat)
        nulls += flat.null_count
    bounds = pc.min_max(flat).as_py()
    outside = classes and bounds["min"] is not None and (bounds["min"] < 0 or bounds["max"] >= classes)
    if nulls or outside:
        _name_bad_label(values, classes, where)
    return values


def _name_bad_label(values: pa.ChunkedArray, classes: int, where: str) -> None:
    for row, entry in enumerate(values.to_pylist()):
        for value in _leaves(entry):
            if value is None or (classes and not 0 <= value < classes):
                valid = f"in 0 to {classes - 1}" if classes else "an integer"
                raise DataError(f"{where}, row {row}: label {value} is not {valid}; mend or leave out the row")


def _leaves(entry: Any) -> Iterator[int | None]:
    if isinstance(entry, list):
        for item in entry:
            yield from _leaves(item)
    else:
        yield entry


def _ids(read: Callable[[list[str]], pa.Table], column: str | None, place: str) -> tuple[str, ...]:
    if column is None:
        return tuple(f"{place}:{row}" for row in range(read([]).num_rows))
    values = read([column]).column(column).to_pylist()
    if None in values:
        raise DataError(f"{place}, column '{column}', row {values.index(None)}: no id; every item needs one")
    ids = tuple(map(str, values))
    if len(set(ids)) < len(ids):
        twice, count = Counter(ids).most_common(1)[0]
        raise DataError(
            f"{place}, column '{column}': id '{twice}' occurs {count} times; "
            "an item is one row (several captions go into a list), or leave `id` out"
        )
    return ids
