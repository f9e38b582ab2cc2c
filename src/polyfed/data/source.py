"""Sources of data: named sets of splits, whose columns are read when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from polyfed.core.errors import DataError
from polyfed.core.files import whole
from polyfed.core.settings import Settings
from polyfed.data.arrow import Mask, fingerprint_of, is_list, is_text, lacking, list_lengths

OTHER_LAYOUTS = (
    "images in class folders or with captions or labels, and files of texts, load as "
    "{name: folder, path: FOLDER}; anything else is written as Parquet first (docs/tutorials/own-data.md)"
)


ColumnNames = str | Annotated[tuple[str, ...], Field(min_length=1)]
"""A column, or several that are one value together, such as age and sex."""


def called(columns: ColumnNames) -> str:
    """What one or several columns are called."""
    return columns if isinstance(columns, str) else f"[{', '.join(columns)}]"


Take = Callable[[npt.NDArray[np.int64]], pa.ChunkedArray]


class Column:
    """One column of a split, whose values are read at first use: what is in a cache is never read again.

    Attributes:
        fingerprint: changes whenever the content may have changed; part of every cache key.
        where: file and column, for error messages.
        encoded: whether the values are numbers of texts, which are what the data hold.
        folder: folder of the data set, in which files lie that values may name; None: they name none.
        recipe: identifies what a generated column is made of, wherever that is; empty: only its values tell.
        gaps: whether items may lack it: entries that are null or blank, and empty lists, are no values.
        take: gives some values, by their rows, without reading the others; None: all are read.
    """

    def __init__(
        self,
        values: pa.ChunkedArray | Callable[[], pa.ChunkedArray],
        fingerprint: str,
        where: str,
        nested: bool | None = None,
        encoded: bool = False,
        folder: Path | None = None,
        recipe: str = "",
        gaps: bool = False,
        take: Take | None = None,
    ) -> None:
        """``values``, or a call that reads them; ``nested`` is looked up in them unless it is given."""
        # whether a column is nested shapes samples; saying so spares reading its values
        self._values, self._nested, self._take = values, nested, take
        self.fingerprint, self.where, self.encoded = fingerprint, where, encoded
        self.folder, self.recipe, self.gaps = folder, recipe, gaps

    @cached_property
    def values(self) -> pa.ChunkedArray:
        """One entry an item: an image struct {bytes, path}, a string, a number, a list of such, or a struct of them."""
        return self._values() if callable(self._values) else self._values

    @property
    def nested(self) -> bool:
        """Whether an item holds a list of values, such as the five captions of an image."""
        return is_list(self.values.type) if self._nested is None else self._nested

    def without_gaps(self) -> tuple[Column, Mask]:
        """The flat values that are there, as a column of one value an entry, and which entries they are."""
        flat = pc.list_flatten(self.values) if self.nested else self.values
        there = ~lacking(flat)
        stamp = fingerprint_of(self.fingerprint, "without gaps")
        return Column(flat.filter(pa.array(there)), stamp, self.where, nested=False, folder=self.folder), there

    def flat_values(self) -> pa.ChunkedArray:
        """The values, those of a nested column one after the other in item order.

        Raises:
            DataError: a value, or a list of values, is null; the message names its row.
        """
        values = self.values
        if values.null_count:
            row = pc.index(values.is_null(), True).as_py()
            raise DataError(
                f"{self.where}, row {row}: no value; fill it or leave out the row (incomplete: leave_out), as polyfed "
                "prepare does"
            )
        flat = pc.list_flatten(values) if self.nested else values
        if flat.null_count:
            place = self.place_of(pc.index(flat.is_null(), True).as_py())
            raise DataError(f"{place}: no value; fill it or leave it out of the list")
        return flat

    def take(self, rows: npt.NDArray[np.int64]) -> pa.ChunkedArray:
        """Some of the flat values; errors as above."""
        return self.flat_values().take(pa.array(rows)) if self._take is None else self._take(rows)

    def texts(self) -> list[str]:
        """The flat values of a column of texts.

        Raises:
            DataError: a value is missing or not a text.
        """
        values = self.flat_values()
        if not is_text(values.type):
            raise DataError(f"{self.where}: holds {values.type}, not texts; name a column of strings")
        texts: list[str] = values.to_pylist()
        return texts

    def place_of(self, row: int) -> str:
        """Where flat value ``row`` stands, for error messages."""
        if not self.nested:
            return f"{self.where}, row {row}"
        ends = np.cumsum(list_lengths(self.values))
        item = int(np.searchsorted(ends, row, side="right"))
        return f"{self.where}, row {item}, entry {row - (int(ends[item - 1]) if item else 0)}"


def text_column(texts: Sequence[str], where: str) -> Column:
    """Texts that come from settings, not from data, as a column: they are tokenised and cached as any are."""
    return Column(pa.chunked_array([pa.array(texts, pa.string())]), fingerprint_of(where, *texts), where, nested=False)


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
        scope: within which ids tell items apart, such as the folder whose file names they are; empty: everywhere.
        count: rows found, items read, and why others are left out; None: of a source that counts none.
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
    count: Count | None = None
    scope: str = ""
    matches: str | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def known_as(self, ids: Sequence[str]) -> list[str]:
        """Ids that tell items of all sources apart."""
        return [f"{self.scope}/{name}" for name in ids] if self.scope else list(ids)

    def modality(self, name: str) -> Column:
        """The column of a modality."""
        return self.read(self.columns[name])


# ---- accounts of what was found, read and left out


@dataclass(frozen=True)
class LeftOut:
    """Some of what was found and is not used.

    Attributes:
        reason: in a phrase.
        count: how many.
        example: name of the first; empty where there is none to give.
    """

    reason: str
    count: int
    example: str = ""

    def __str__(self) -> str:
        example = f", such as '{self.example}'" if self.example else ""
        return f"{self.count:,} {self.reason}{example}"


@dataclass(frozen=True)
class Count:
    """Count of one unit of a source: ``found`` is ``read`` plus all that is left out.

    Attributes:
        unit: files, rows, columns, items of a split, tokens, ...
        found: counted before anything is decided.
        read: counted in what is used.
        left_out: the rest, by reason.
    """

    unit: str
    found: int
    read: int
    left_out: tuple[LeftOut, ...] = ()

    @classmethod
    def of(cls, unit: str, found: int, read: int, left_out: Iterable[LeftOut]) -> Count:
        """A count without the reasons that leave nothing out."""
        return cls(unit, found, read, tuple(part for part in left_out if part.count))

    @property
    def adds_up(self) -> bool:
        return self.found == self.read + sum(part.count for part in self.left_out)

    def lines(self) -> list[str]:
        """One line, and one more for each reason."""
        return [
            f"{self.unit}: {self.found:,} found, {self.read:,} read",
            *(f"  left out: {each}" for each in self.left_out),
        ]

    def plain(self) -> dict[str, Any]:
        """For a file: numbers and reasons, without names of files."""
        left_out = {part.reason: part.count for part in self.left_out}
        return {"unit": self.unit, "found": self.found, "read": self.read, "left_out": left_out}


Accounts = Mapping[str, tuple[Count, ...]]
"""Source -> its counts."""


class Source(Settings):
    """A data set with splits. Subclasses live in ``polyfed.data.sources``, one a module."""

    home: ClassVar[str] = "polyfed.data.sources"

    columns: dict[str, ColumnNames] = Field(
        default_factory=dict,
        description="modality -> column that holds it, or list of columns of one value an item, such as [age, sex]",
    )
    targets: dict[str, str] = Field(
        default_factory=dict,
        description="target name (label, answer, ...) -> column with class numbers, booleans or class names",
    )

    def beside(self, folder: Path, name: str, data_dir: Path | None) -> Self:
        """The source with its path made absolute where it lies beside the file that names it, in a folder.

        A path that begins with a point always does; another does unless it is in the data folder.

        Raises:
            ValueError: it may be either.
        """
        given = getattr(self, "path", None)
        if not isinstance(given, str) or Path(given).expanduser().is_absolute():
            return self
        here, there = whole(given, folder), None if data_dir is None else whole(given, data_dir)
        if not given.startswith("."):
            if there is not None and there.exists() and here.exists() and not there.samefile(here):
                raise ValueError(
                    f"sources.{name}.path: '{given}' may be '{there}', in the data folder, or '{here}', beside the "
                    f"file; write ./{given}, or an absolute path"
                )
            if not here.exists():
                return self
        return self.model_copy(update={"path": str(here)})

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

    def account(self, *, name: str, data_dir: Path | None, used: Collection[str] = ()) -> tuple[Count, ...]:
        """Counts of files, rows, columns and items: found, read, and left out by reason.

        Args:
            name: what the configuration calls this source.
            data_dir: folder that relative paths start from.
            used: columns that are read though the source names them not, such as masks.

        Raises:
            DataError: as for ``open``.
        """
        return ()

    def most_items(self, split: str, name: str) -> int | None:
        """Items of a split at most, where settings alone say; ``name`` is what the configuration calls the source.

        Raises:
            DataError: the settings say that there is no such split.
        """
        return None

    @property
    def target_names(self) -> tuple[str, ...] | None:
        """Targets of all splits; None: only the data tell, as where ``open`` makes its own."""
        return None if "." in self.component_name() else tuple(self.targets) or None

    @property
    def column_names(self) -> dict[str, str]:
        """Modality -> what its column, or columns, are called in a split."""
        return {modality: called(columns) for modality, columns in self.columns.items()}


def path_of(path: str, name: str, data_dir: Path | None, *, may_be_file: bool = False) -> Path:
    """The folder that the setting ``path`` of source ``name`` means, or the file where that may be one.

    Raises:
        DataError: it is not there, or relative without a data folder.
    """
    given = Path(path).expanduser()
    full_path = given if data_dir is None else data_dir / given
    if may_be_file and full_path.is_file():
        return full_path
    if not given.is_absolute() and data_dir is None:
        remedy = "no data folder is set; correct the path, or give the folder with --data-dir or POLYFED_DATA"
        raise DataError(f"source '{name}': '{path}' is not beside the file that names it, and {remedy}")
    if full_path.is_file():
        raise DataError(f"source '{name}': '{path}' is a file, not a folder of Parquet files; {OTHER_LAYOUTS}")
    if not full_path.is_dir():
        start = f" under the data folder '{data_dir}'" if data_dir is not None and full_path != given else ""
        remedy = "correct the path, or the data folder (--data-dir or POLYFED_DATA)"
        raise DataError(f"source '{name}': there is no folder '{path}'{start}; {remedy}")
    return full_path
