"""Sources of data: named sets of Arrow tables, one a split, read column by column."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
from pydantic import Field

from polyfed.settings import Component


@dataclass(frozen=True)
class Column:
    """One column of a split.

    Attributes:
        values: one entry an item: an image struct {bytes, path}, a string, a number, or a list of such.
        fingerprint: changes whenever the content may have changed; part of every cache key.
        where: file and column, for error messages.
    """

    values: pa.ChunkedArray
    fingerprint: str
    where: str

    @property
    def nested(self) -> bool:
        """Whether an item holds a list of values, such as the five captions of a picture."""
        kind = self.values.type
        return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


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
    """

    source: str
    name: str
    ids: Sequence[str]
    columns: Mapping[str, str]
    targets: Mapping[str, str]
    classes: Mapping[str, tuple[str, ...]]
    read: Callable[[str], Column]

    def __len__(self) -> int:
        return len(self.ids)

    def modality(self, name: str) -> Column:
        """The column of a modality."""
        return self.read(self.columns[name])


class Source(Component):
    """A data set with splits. Subclasses live in ``polyfed.data.sources``, one a module."""

    home: ClassVar[str] = "polyfed.data.sources"

    columns: dict[str, str] = Field(default_factory=dict, description="modality -> column that holds it")
    targets: dict[str, str] = Field(
        default_factory=dict, description="target name (label, answer, ...) -> column with integer values"
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
