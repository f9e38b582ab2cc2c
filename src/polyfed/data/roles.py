"""What the columns of a table are for, guessed from their names and values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from polyfed.core.errors import DataError
from polyfed.data.arrow import innermost, is_list, is_text
from polyfed.data.pictures import opened_picture, picture_bytes, reason_of
from polyfed.data.tables import SplitTable

_TEXTS = ("captions", "caption", "text", "texts", "comment", "sentence", "title", "description", "report", "review")
_REPEATING = re.compile("(" + "|".join(_TEXTS) + "|finding|impression|raw)s?")  # texts, however few differ
_LABELS = ("label", "labels", "class", "category", "topic", "target", "sentiment", "rating", "fine_label")
_FEW = 1000  # different values above which texts are no names of classes
_NO_CONTENT = ("file_name", "split", "id", "path", "url")


@dataclass(frozen=True)
class ColumnRoles:
    """Columns that hold pictures, texts and classes; None where none seems to.

    Attributes:
        image, text, label: names of columns.
    """

    image: str | None
    text: str | None
    label: str | None

    @classmethod
    def of(cls, table: pa.Table) -> ColumnRoles:
        """By the usual names; else by what values look like: texts are long and differ, classes repeat."""
        image = _first(field.name for field in table.schema if is_picture(field.type))
        free = [name for name in table.column_names if name != image and name.lower() not in _NO_CONTENT]
        texts = _texts(table, free)
        unusual = [name for name in texts if not _REPEATING.fullmatch(name.lower())]
        label = _called(free, _LABELS) or _first(filter(lambda name: _repeats(table.column(name)), unusual))
        others = [name for name in texts if name != label]
        return cls(image, _called(others, _TEXTS) or _first(others), label)

    def absent(self, splits: Mapping[str, SplitTable]) -> list[str]:
        """Which splits lack classes that another has."""
        columns = {split: table.read(self.label) for split, table in splits.items() if self.label}
        held = {split: set(one.unique().to_pylist()) for split, one in columns.items() if not is_list(one.type)}
        every = set().union(*held.values()) - {None}
        gaps = {split: sorted(every - own, key=str) for split, own in held.items()}
        return [
            f"{split} lacks {len(gap)} of {len(every)} classes, such as '{gap[0]}'"
            for split, gap in gaps.items()
            if gap
        ]

    def sample(self, table: SplitTable) -> list[str]:
        """The first item, a column a line with its role, as it would be trained with.

        Raises:
            DataError: its picture is none.
        """
        role_of = {self.image: "picture", self.text: "text", self.label: "class"}
        lines = []
        for name in table.schema.names:
            value = table.read(name)[0].as_py()
            shown = " ".join(str(value[0] if isinstance(value, list) and value else value).split())[:60]
            if role_of.get(name) == "picture":
                try:
                    with opened_picture(picture_bytes(value, table.folder)) as image:
                        shown = f"{image.width} x {image.height} {image.format}"
                except Exception as error:  # Pillow's decoders raise anything
                    raise DataError(f"{table.place}: column '{name}' holds no pictures ({reason_of(error)})") from error
            lines.append(f"{name} ({role_of.get(name, 'not used')}): {shown}")
        return lines

    @property
    def settings(self) -> str:
        columns = {"image": self.image, "text": self.text}
        named = ", ".join(f"{modality}: {column}" for modality, column in columns.items() if column)
        return f"columns: {{{named}}}" + (f", targets: {{label: {self.label}}}" if self.label else "")


def _texts(table: pa.Table, names: Sequence[str]) -> list[str]:
    return [name for name in names if is_text(innermost(table.schema.field(name).type))]


def _first(names: Iterable[str]) -> str | None:
    return next(iter(names), None)


def is_picture(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}


def _called(names: Sequence[str], usual: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(names)}
    return next((lower[name] for name in usual if name in lower), None)


def _repeats(values: pa.ChunkedArray) -> bool:
    if is_list(values.type) or not len(values):
        return False
    different = len(values.unique())
    return different <= _FEW and 2 * different <= len(values)
