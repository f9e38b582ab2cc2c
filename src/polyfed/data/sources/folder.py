"""A folder as people have it: pictures with captions or in class folders, or files of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from polyfed.core.errors import DataError, nearest
from polyfed.data.annotations import FILE
from polyfed.data.folder_table import FolderLayout, folder_table
from polyfed.data.source import folder_of
from polyfed.data.tables import Share, SplitTable, StoredSource


class Folder(StoredSource):
    """A folder of pictures with captions or labels, of pictures in class folders, or of texts, without conversion.

    Found without being told: ``metadata.csv`` or ``.jsonl`` (the *imagefolder* of Hugging Face), ``captions.csv``,
    ``.tsv``, ``.jsonl`` or ``.txt``, ``labels.csv``, annotations of COCO, Karpathy's JSON, the ``.token`` and
    ``results.csv`` of Flickr8k and Flickr30k; class folders, with or without folders of splits above; without pictures
    ``.csv``, ``.tsv``, ``.jsonl`` and ``.txt`` (a text a line). Rows of one picture become one item, with lists of what
    differs among them.

    Without pictures WAV files are read as these are. Columns are those of the file, with ``image`` for the picture or
    ``audio`` for the recording, ``file_name`` for its path, ``label`` for its class
    folder, ``captions`` for captions of COCO, Karpathy and Flickr, ``text`` for lines. Splits are told by a column, by
    names of files or folders, by Flickr8k's lists; else ``fractions`` are drawn, the same on every machine.
    """

    path: str = Field(description="the folder, or one file of texts: absolute, or relative to the data folder")
    annotations: str | None = Field(
        default=None, description="file with captions, labels or texts, relative to the folder; null: found by its name"
    )
    file_column: str | None = Field(
        default=None,
        description="column with pictures' file names; null: one of the usual names (file_name, image, ...)",
    )
    split_column: str | None = Field(
        default=None, description="column that says the split; null: `split`, if there is one"
    )
    splits: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(
        default_factory=dict, description="our split -> values of the column, or names of folders, that it is made of"
    )
    fractions: dict[str, Share] = Field(
        default={"validation": 0.1, "test": 0.1},
        description="share of each split where nothing tells; the rest is train",
    )

    def rows(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """See ``TableSource``; shares are drawn only where nothing tells splits."""
        is_told = folder_table(self.layout(name, data_dir)).is_told
        return (self.table if is_told else super().rows)(split, name=name, data_dir=data_dir)

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The rows of one split; lists the folder and reads its annotations."""
        layout = self.layout(name, data_dir)
        content = folder_table(layout)
        rows = content.of(split)
        if not rows.num_rows:
            place = f"source '{name}', path '{self.path}'"
            hint = f"{nearest(split, set(content.splits))}; or give it a share in `fractions`"
            raise DataError(f"{place}: no split '{split}'; {hint}")
        return SplitTable(
            read=rows.column,
            count=lambda: rows.num_rows,
            schema=rows.schema,
            where=Path(self.path).as_posix(),
            split=split,
            fingerprint=content.fingerprint,
            ids=FILE if content.files else None,
            everywhere=content.rows.column,
            folder=layout.folder,
        )

    def layout(self, name: str, data_dir: Path | None) -> FolderLayout:
        """What the settings say, with the folder found.

        Raises:
            DataError: it is not there.
        """
        given = Path(self.path).expanduser()
        full_path = given if data_dir is None else data_dir / given
        return FolderLayout(
            path=full_path if full_path.is_file() else folder_of(self.path, name, data_dir),
            annotations=self.annotations,
            file_column=self.file_column,
            split_column=self.split_column,
            splits=tuple(self.splits.items()),
            refuses_gaps=self.incomplete == "refuse",
        )
