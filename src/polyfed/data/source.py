"""Sources of data: named sets of Arrow tables, one a split, read column by column."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pyarrow as pa
from pydantic import Field, StrictBool, StrictInt, StrictStr

from polyfed.core.errors import DataError
from polyfed.core.settings import Component

OTHER_LAYOUTS = (
    "pictures with a metadata.csv (columns file_name, text, ...) load as {name: hub, repository: ./FOLDER}; "
    "anything else is written as Parquet first (docs/quickstart.md, 'Your own data')"
)

Value = StrictBool | StrictInt | StrictStr
Values = Value | Annotated[list[Value], Field(min_length=1)]


@dataclass(frozen=True)
class Column:
    """One column of a split.

    Attributes:
        values: one entry an item: an image struct {bytes, path}, a string, a number, or a list of such.
        fingerprint: changes whenever the content may have changed; part of every cache key.
        where: file and column, for error messages.
        encoded: whether the values are numbers of texts, which are what the data hold.
        folder: folder of the data set, in which files lie that values may name; None: they name none.
        recipe: identifies what a generated column is made of, wherever that is; empty: only its values tell.
    """

    values: pa.ChunkedArray
    fingerprint: str
    where: str
    encoded: bool = False
    folder: Path | None = None
    recipe: str = ""

    @property
    def nested(self) -> bool:
        """Whether an item holds a list of values, such as the five captions of a picture."""
        return is_list(self.values.type)


@dataclass(frozen=True)
class Split:
    """One split of a source; a column is read only when it is asked for.

    Attributes:
        source: name of the source in the configuration.
        name: ``train``, ``validation`` or ``test``.
        ids: one id an item, unique within the split; equal ids in two splits mean the same item.
        columns: modality -> column name.
        targets: target name (``label``, ``answer``, ...) -> column name.
        classes: target name -> class names in label order, where the source says.
        read: column name -> Column; raises DataError naming file and column if it is not there.
        left_out: column -> items that were left out because this column lacks them; an item that lacks two counts in
            both. Empty unless the source leaves incomplete items out.
        matches: column whose equal values make items right answers to each other; None: each item is its own only.
    """

    source: str
    name: str
    ids: Sequence[str]
    columns: Mapping[str, str]
    targets: Mapping[str, str]
    classes: Mapping[str, tuple[str, ...]]
    read: Callable[[str], Column]
    left_out: Mapping[str, int] = field(default_factory=dict)
    matches: str | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def modality(self, name: str) -> Column:
        """The column of a modality."""
        return self.read(self.columns[name])


class Source(Component):
    """A data set with splits. Subclasses live in ``polyfed.data.sources``, one a module."""

    home: ClassVar[str] = "polyfed.data.sources"
    identified_by: ClassVar[frozenset[str] | None] = None
    """Settings that say which data these are; None: all but those of every source or table, and ``id``."""

    columns: dict[str, str] = Field(default_factory=dict, description="modality -> column that holds it")
    targets: dict[str, str] = Field(
        default_factory=dict,
        description="target name (label, answer, ...) -> column with class numbers, booleans or class names",
    )

    @abstractmethod
    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        """Open one split.

        Args:
            split: ``train``, ``validation`` or ``test``.
            name: what the configuration calls this source.
            data_dir: folder that relative paths start from.

        Raises:
            DataError: the folder, the split or a named column is missing.
        """

    def identity(self, data_dir: Path | None) -> dict[str, Any]:
        """Which data these are, whatever is picked from them: equal for two sources that read the same.

        A ``path`` counts as the folder that it means, however it is written, whether or not it is there.
        """
        dumped = self.model_dump(mode="json")
        chosen = self.identified_by
        kept = dumped.keys() - TableSource.model_fields.keys() - {"id"} if chosen is None else {"name", *chosen}
        found = {key: value for key, value in dumped.items() if key in kept}
        if isinstance(path := found.get("path"), str):
            found["path"] = str(((data_dir or Path()) / Path(path).expanduser()).resolve())
        return found


@dataclass(frozen=True)
class Selection:
    """Which rows of a table are items, and which of these answer each other.

    Attributes:
        where: column -> the values, one of which an item must have.
        leave_out: leave out items that lack a modality or a target.
        matches: see ``Split``.
    """

    where: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    leave_out: bool = False
    matches: str | None = None


class TableSource(Source):
    """A source whose splits are tables with one row an item; some of the rows may be all that is wanted."""

    where: dict[str, Values] = Field(
        default_factory=dict,
        description="column -> value, or list of values, that an item must have; other rows are no items",
    )
    incomplete: Literal["refuse", "leave_out"] = Field(
        default="refuse",
        description="items without a modality of ``columns`` (null; of texts also blank) or without a target: an error "
        "when they are read, or left out",
    )
    matches: str | None = Field(
        default=None,
        description="column of texts or integers: items with equal values are right answers to each other, an item "
        "with a null or blank one only to itself",
    )

    def selection(self) -> Selection:
        """The rows that are items."""
        where = {column: value if isinstance(value, list) else [value] for column, value in self.where.items()}
        return Selection(where, self.incomplete == "leave_out", self.matches)


def is_list(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a list of any sort."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a string of any sort."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def folder_of(path: str, name: str, data_dir: Path | None) -> Path:
    """The folder that the setting ``path`` of source ``name`` means.

    Raises:
        DataError: it is not there, or relative without a data folder.
    """
    given = Path(path).expanduser()
    if not given.is_absolute() and data_dir is None:
        raise DataError(
            f"source '{name}': path '{path}' is relative and no data folder is set; "
            "give it with --data-dir or POLYFED_DATA"
        )
    folder = given if data_dir is None else data_dir / given
    if folder.is_file():
        raise DataError(f"source '{name}': '{path}' is a file, not a folder of Parquet files; {OTHER_LAYOUTS}")
    if not folder.is_dir():
        start = f" under the data folder '{data_dir}'" if data_dir is not None and folder != given else ""
        raise DataError(
            f"source '{name}': there is no folder '{path}'{start}; "
            "correct the path, or the data folder (--data-dir or POLYFED_DATA)"
        )
    return folder
