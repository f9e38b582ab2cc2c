"""What the library ``datasets`` opens: data sets that it saved, files of Arrow and Feather, and those of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from polyfed.core.errors import DataError, nearest
from polyfed.data import arrow
from polyfed.data.arrow import dataset_column, fingerprint_of, fingerprint_of_files, joined
from polyfed.data.source import folder_of
from polyfed.data.tables import SplitTable, StoredSource

_ENDINGS = (".arrow", ".feather", ".ipc")
_SAVED = ("dataset_dict.json", "state.json")


class Arrow(StoredSource):
    """What ``save_to_disk`` of ``datasets`` wrote, or files ``train.arrow`` (.feather, .ipc) in a folder, as they are.

    A data set without splits, or a single file, is ``train``. Pictures are image features with their bytes, or with
    paths within the folder.
    """

    path: str = Field(description="folder, or one file: absolute, or relative to the data folder")
    splits: dict[str, str] = Field(
        default_factory=dict, description="our split -> name of the saved one, or of the file without its ending"
    )
    max_bytes: arrow.MaxBytes = None
    id: str | None = Field(
        default=None, description="column that identifies an item; without it an id is path, split and row"
    )

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The rows of one split; opens the files, which stay mapped into memory."""
        place = self._place(name, data_dir)
        parts = _parts(place, name, arrow.most_bytes(_files(place), self.max_bytes))
        wanted = self.splits.get(split, split)
        if wanted not in parts:
            raise DataError(
                f"source '{name}', path '{self.path}': no split '{wanted}'; {nearest(wanted, parts)}; or set fractions"
            )

        data = parts[wanted]
        return SplitTable(
            read=lambda column: dataset_column(data, column),
            count=lambda: len(data),
            schema=data.features.arrow_schema,
            where=Path(self.path).as_posix(),
            split=split,
            fingerprint=fingerprint_of(wanted, fingerprint_of_files(_files(place))),
            ids=self.id,
            everywhere=lambda column: joined(dataset_column(part, column) for part in parts.values()),
            folder=place if place.is_dir() else place.parent,
        )

    def _place(self, name: str, data_dir: Path | None) -> Path:
        given = Path(self.path).expanduser()
        file = given if data_dir is None else data_dir / given
        return file if file.is_file() else folder_of(self.path, name, data_dir)


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.suffix in _ENDINGS)


def _parts(place: Path, name: str, most: int) -> dict[str, Any]:
    """Split -> data set, mapped into memory, in which nothing points beyond the files."""
    try:
        parts = {"train": _opened(place, most)} if place.is_file() else _saved(place, most)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"source '{name}': cannot read '{place}' ({reason}); give what save_to_disk of datasets wrote, or files of "
            "Arrow IPC or Feather"
        ) from error
    if not parts:
        raise DataError(
            f"source '{name}': '{place}' holds neither a data set that save_to_disk wrote nor files ending in "
            f"{', '.join(_ENDINGS)}; give another path, or another source (folder, parquet)"
        )
    return parts


def _saved(folder: Path, most: int) -> dict[str, Any]:
    """What ``save_to_disk`` wrote, or the files that lie in the folder itself."""
    import datasets

    if not any((folder / mark).is_file() for mark in _SAVED):
        return {file.stem: _opened(file, most) for file in _files(folder) if file.parent == folder}
    saved = datasets.load_from_disk(str(folder))
    parts = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    for part in parts.values():
        part.data.validate(full=True)
        if part._indices is not None and pc.max(part._indices.column(0)).as_py() >= len(part.data):
            raise IndexError(f"an index is beyond the {len(part.data)} rows")
    return parts


def _opened(file: Path, most: int) -> Any:
    """One file, of the format with random access (also called Feather) or of the stream."""
    import datasets

    source = pa.memory_map(str(file))
    try:
        reader = pa.ipc.open_file(source)
        batches = (reader.get_batch(place) for place in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        source.seek(0)
        reader = batches = pa.ipc.open_stream(source)
    table = pa.Table.from_batches(arrow.bounded(batches, most, f"'{file}'"), reader.schema)
    return datasets.Dataset(datasets.table.InMemoryTable(table))


class Hub(StoredSource):
    """A data set of the Hugging Face hub, downloaded once, then read column by column from its cache."""

    short_name: ClassVar[str] = "hub"

    repository: str = Field(description="name on the hub, e.g. uoft-cs/cifar100")
    config: str | None = Field(default=None, description="configuration of the data set, where it has several")
    revision: str | None = Field(default=None, description="commit or tag; fix it, or the data may change")
    splits: dict[str, str] = Field(
        default_factory=dict, description="our split -> its name on the hub, e.g. {validation: 'train[90%:]'}"
    )
    id: str | None = Field(
        default=None,
        description="column that identifies an item; without it an id is repository, split and row",
    )

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The table of one split; downloads it if it is not in the cache of ``datasets``."""
        import datasets  # takes a second, and most runs do not need it

        data = self._loaded(self.splits.get(split, split), name)
        return SplitTable(
            read=lambda column: dataset_column(data, column),
            count=lambda: len(data),
            schema=data.features.arrow_schema,
            where=self.repository,
            split=split,
            fingerprint=fingerprint_of(self.repository, self.config, self.revision, data._fingerprint),
            ids=self.id,
            everywhere=lambda column: joined(
                dataset_column(part, column) for part in self._loaded(None, name).values()
            ),
            folder=Path(datasets.config.HF_CACHE_HOME),  # pictures among what it downloads
        )

    def _loaded(self, split: str | None, name: str) -> Any:
        """One split, or with None all of them by name."""
        import datasets
        from huggingface_hub import constants

        constants.HF_HUB_DISABLE_TELEMETRY = True
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        try:
            return datasets.load_dataset(self.repository, self.config, split=split, revision=self.revision)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = " ".join(str(error).split())
            what = f"source '{name}': cannot load '{self.repository}' (config {self.config}, split '{split}'): "
            raise DataError(f"{what}{reason}; check names and connection, or use a local 'parquet' source") from error
