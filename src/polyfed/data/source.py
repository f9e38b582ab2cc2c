"""Sources of data: named sets of splits, whose columns are read at first use, and accounts of what was read."""

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
    """Name of one column, or of several that are one value together."""
    return columns if isinstance(columns, str) else f"[{', '.join(columns)}]"


Take = Callable[[npt.NDArray[np.int64]], pa.ChunkedArray]


class Column:
    """One column of a split, whose values are read at first use: cached content is never read again.

    Attributes:
        fingerprint: changes whenever the content may have changed; part of every cache key.
        where: file and column, for error messages.
        encoded: True if the values are class numbers in place of texts that the data hold.
        folder: folder of the data set, in which files lie that values may name; None: they name none.
        recipe: identifies the settings of a generated column, on every machine alike; empty: stored data.
        gaps: True if items may lack it: null and blank entries and empty lists then count as missing.
        lengths: number of values of each item.
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
        lengths: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Column of ``values``, or of those that a call reads; without ``nested`` the values decide.

        ``take`` reads those of some items without the others, and needs ``lengths``.
        """
        # nesting and lengths shape samples: given here, they need no values
        self._values, self._nested, self._take, self._lengths = values, nested, take, lengths
        self.fingerprint, self.where, self.encoded = fingerprint, where, encoded
        self.folder, self.recipe, self.gaps = folder, recipe, gaps

    @cached_property
    def values(self) -> pa.ChunkedArray:
        """One entry per item: an image struct {bytes, path}, a string, a number, a list or a struct of these."""
        return self._values() if callable(self._values) else self._values

    @property
    def nested(self) -> bool:
        """True if an item holds a list of values, such as the five captions of an image."""
        return is_list(self.values.type) if self._nested is None else self._nested

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        if self._lengths is not None:
            return self._lengths
        return list_lengths(self.values) if self.nested else np.ones(len(self.values), np.int64)

    def of_items(self, items: npt.NDArray[np.int64]) -> pa.ChunkedArray:
        """One entry for each of some items."""
        return self.values.take(pa.array(items)) if self._take is None else self._take(items)

    def without_gaps(self) -> tuple[Column, Mask]:
        """Flat values that are not missing, as a column of one value per entry, and a mask of those entries."""
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
            remedy = "fill it or leave out the row (incomplete: leave_out), as polyfed prepare does"
            raise DataError(f"{self.where}, row {row}: no value; {remedy}")
        flat = pc.list_flatten(values) if self.nested else values
        if flat.null_count:
            place = self.place_of(pc.index(flat.is_null(), True).as_py())
            raise DataError(f"{place}: no value; fill it or leave it out of the list")
        return flat

    def take(self, rows: npt.NDArray[np.int64]) -> pa.ChunkedArray:
        """Flat values of some rows; errors of ``flat_values``."""
        if self._take is None:
            return self.flat_values().take(pa.array(rows))
        if not self.nested:
            return self._take(rows)
        ends = np.cumsum(self.lengths)
        items, inverse = np.unique(np.searchsorted(ends, rows, side="right"), return_inverse=True)
        # rows of other items are not there
        skipped = (ends - self.lengths)[items] - np.cumsum(self.lengths[items]) + self.lengths[items]
        return pc.list_flatten(self._take(items)).take(pa.array(rows - skipped[inverse]))

    def texts(self, rows: npt.NDArray[np.int64] | None = None) -> list[str]:
        """The flat values of a column of texts, or some of them.

        Raises:
            DataError: a value is missing or not a text.
        """
        values = self.flat_values() if rows is None else self.take(rows)
        if not is_text(values.type):
            raise DataError(f"{self.where}: holds {values.type}, not texts; name a column of strings")
        texts: list[str] = values.to_pylist()
        return texts

    def place_of(self, row: int) -> str:
        """Position of flat value ``row`` in the data, for error messages."""
        if not self.nested:
            return f"{self.where}, row {row}"
        ends = np.cumsum(self.lengths)
        item = int(np.searchsorted(ends, row, side="right"))
        return f"{self.where}, row {item}, entry {row - (int(ends[item - 1]) if item else 0)}"


def text_column(texts: Sequence[str], where: str) -> Column:
    """Texts from settings as a column, which is tokenised and cached as those of data."""
    return Column(pa.chunked_array([pa.array(texts, pa.string())]), fingerprint_of(where, *texts), where, nested=False)


@dataclass(frozen=True)
class Split:
    """One split of a source, whose columns are read at first use.

    Attributes:
        source: name of the source in the configuration.
        name: ``train``, ``validation`` or ``test``.
        ids: one id per item, unique within the split; equal ids in two splits mean the same item.
        columns: modality -> column name.
        targets: target name (``label``, ``answer``, ...) -> column name.
        classes: target name -> class names in label order, where the source has them.
        read: column name -> Column; raises DataError naming file and column if it is not there.
        left_out: column -> items left out because they lack it; an item that lacks two columns counts in both. Empty
            unless the source leaves incomplete items out.
        scope: where ids are unique, such as the folder whose file names they are; empty: everywhere.
        count: rows, items read, and reasons why others are left out; None: the source does not count.
        matches: column whose equal values make items right answers to each other; None: each item only to itself.
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
        """Ids that are unique among all sources."""
        return [f"{self.scope}/{name}" for name in ids] if self.scope else list(ids)

    def modality(self, name: str) -> Column:
        """The column of a modality."""
        return self.read(self.columns[name])


# ---- accounts of what was found, read and left out


@dataclass(frozen=True)
class LeftOut:
    """Units of data that are not used.

    Attributes:
        reason: Reason in a phrase.
        count: Number of units.
        example: Name of the first; may be empty.
    """

    reason: str
    count: int
    example: str = ""

    def __str__(self) -> str:
        example = f", such as '{self.example}'" if self.example else ""
        return f"{self.count:,} {self.reason}{example}"


@dataclass(frozen=True)
class Count:
    """Count of one unit of a source: ``total`` is ``read`` plus everything left out.

    Attributes:
        unit: files, rows, columns, items of a split, tokens, ...
        total: Units before anything is left out.
        read: Units that are used.
        left_out: Other units, by reason.
    """

    unit: str
    total: int
    read: int
    left_out: tuple[LeftOut, ...] = ()

    @classmethod
    def of(cls, unit: str, total: int, read: int, left_out: Iterable[LeftOut]) -> Count:
        """A count without the reasons that do not occur."""
        return cls(unit, total, read, tuple(part for part in left_out if part.count))

    @property
    def adds_up(self) -> bool:
        return self.total == self.read + sum(part.count for part in self.left_out)

    def lines(self) -> list[str]:
        """One line, and one more per reason."""
        left_out = (f"  left out: {each}" for each in self.left_out)
        return [f"{self.unit}: {self.total:,} found, {self.read:,} read", *left_out]

    def plain(self) -> dict[str, Any]:
        """Numbers and reasons for a file, without names of files."""
        left_out = {part.reason: part.count for part in self.left_out}
        return {"unit": self.unit, "found": self.total, "read": self.read, "left_out": left_out}


Accounts = Mapping[str, tuple[Count, ...]]
"""Source -> its counts."""


class Source(Settings):
    """A data set with splits. Subclasses live in ``polyfed.data.sources``, one a module."""

    home: ClassVar[str] = "polyfed.data.sources"

    columns: dict[str, ColumnNames] = Field(
        default_factory=dict, description="modality -> column, or columns that are one value, such as [age, sex]"
    )
    targets: dict[str, str] = Field(
        default_factory=dict, description="target (label, answer, ...) -> column of class numbers, booleans or names"
    )

    def beside(self, folder: Path, name: str, data_dir: Path | None) -> Self:
        """The source with its path made absolute, if it lies in the folder of the file that names it.

        A path that begins with a point always does; any other unless it is in the data folder.

        Raises:
            ValueError: both are possible.
        """
        given = getattr(self, "path", None)
        if not isinstance(given, str) or Path(given).expanduser().is_absolute():
            return self
        here, there = whole(given, folder), None if data_dir is None else whole(given, data_dir)
        if not given.startswith("."):
            if there is not None and there.exists() and here.exists() and not there.samefile(here):
                both = f"'{there}', in the data folder, or '{here}', next to the file"
                raise ValueError(f"sources.{name}.path: '{given}' may be {both}; write ./{given}, or an absolute path")
            if not here.exists():
                return self
        return self.model_copy(update={"path": str(here)})

    @abstractmethod
    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        """Open one split.

        Args:
            split: ``train``, ``validation`` or ``test``.
            name: Name of this source in the configuration.
            data_dir: folder that relative paths start from.

        Raises:
            DataError: the folder, the split or a named column is missing.
        """

    def account(self, *, name: str, data_dir: Path | None, used: Collection[str] = ()) -> tuple[Count, ...]:
        """Counts of files, rows, columns and items: found, read, and left out by reason.

        Args:
            name: Name of this source in the configuration.
            data_dir: folder that relative paths start from.
            used: columns that are read although the source does not name them, such as masks.

        Raises:
            DataError: the same as for ``open``.
        """
        return ()

    def most_items(self, split: str, name: str) -> int | None:
        """Largest possible number of items of a split, if settings alone bound it.

        Raises:
            DataError: by its settings the source ``name`` does not have the split.
        """
        return None

    @property
    def target_names(self) -> tuple[str, ...] | None:
        """Targets of all splits; None: they depend on the data, as where ``open`` makes its own."""
        return None if "." in self.component_name() else tuple(self.targets) or None

    @property
    def column_names(self) -> dict[str, str]:
        """Modality -> name of its column, or columns, in a split."""
        return {modality: called(columns) for modality, columns in self.columns.items()}


def path_of(path: str, name: str, data_dir: Path | None, *, may_be_file: bool = False) -> Path:
    """Folder of the setting ``path`` of source ``name``, or a file where that is allowed.

    Raises:
        DataError: it does not exist, or is relative without a data folder.
    """
    given = Path(path).expanduser()
    full_path = given if data_dir is None else data_dir / given
    if may_be_file and full_path.is_file():
        return full_path
    if not given.is_absolute() and data_dir is None:
        remedy = "no data folder is set; correct the path, or give the folder with --data-dir or POLYFED_DATA"
        raise DataError(f"source '{name}': '{path}' is not next to the file that names it, and {remedy}")
    if full_path.is_file():
        raise DataError(f"source '{name}': '{path}' is a file, not a folder of Parquet files; {OTHER_LAYOUTS}")
    if not full_path.is_dir():
        start = f" under the data folder '{data_dir}'" if data_dir is not None and full_path != given else ""
        remedy = "correct the path, or the data folder (--data-dir or POLYFED_DATA)"
        raise DataError(f"source '{name}': no folder '{path}'{start}; {remedy}")
    return full_path
