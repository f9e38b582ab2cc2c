"""What the library ``datasets`` opens: data sets that it saved, files of Arrow and Feather, and those of the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from polyfed.core.errors import DataError, nearest
from polyfed.core.extras import brought_by
from polyfed.data import arrow
from polyfed.data.arrow import file_key, fingerprint_of
from polyfed.data.files import usual_name
from polyfed.data.source import path_of
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
    id: str | None = Field(default=None, description="column that identifies an item; None: by path, split and row")

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The rows of one split; opens the files, which stay mapped into memory."""
        path = path_of(self.path, name, data_dir, may_be_file=True)
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _ENDINGS)
        parts = _opened_parts(path, files, name, arrow.most_bytes(files, self.max_bytes))
        wanted = self.splits.get(split) or usual_name(split, parts)
        if wanted not in parts:
            raise DataError(
                f"source '{name}', path '{self.path}': no split '{wanted}'; {nearest(wanted, parts)}; or set fractions"
            )
        return SplitTable.of_parts(
            parts[wanted],
            parts.values,
            where=Path(self.path).as_posix(),
            split=split,
            stamp=fingerprint_of(wanted, *map(file_key, files)),
            ids=self.id,
            folder=path if path.is_dir() else path.parent,
        )


def _opened_parts(path: Path, files: Sequence[Path], name: str, most: int) -> dict[str, Any]:
    """Split -> data set that ``save_to_disk`` wrote, or file in the folder; nothing points beyond what there is."""
    is_saved = any((path / mark).is_file() for mark in _SAVED)
    try:
        # which files a saved set is made of is written in it
        unpacked = map(arrow.unpacked_bytes, filter(Path.is_file, path.rglob("*")) if is_saved else files)
        arrow.require_bytes(sum(unpacked), most, f"'{path}'")
        if path.is_file():
            parts = {"train": _opened(path, most)}
        elif is_saved:
            parts = _saved(path)
        else:
            parts = {file.stem: _opened(file, most) for file in files if file.parent == path}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"source '{name}': cannot read '{path}' ({reason}); give what save_to_disk of datasets wrote, or files of "
            "Arrow IPC or Feather"
        ) from error
    if not parts:
        raise DataError(
            f"source '{name}': '{path}' holds neither a data set that save_to_disk wrote nor files ending in "
            f"{', '.join(_ENDINGS)}; give another path, or another source (folder, parquet)"
        )
    return parts


def _saved(folder: Path) -> dict[str, Any]:
    with brought_by("hub"):
        import datasets

    saved = datasets.load_from_disk(str(folder))
    parts = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    for part in parts.values():
        part.data.validate(full=True)
        if part._indices is not None and pc.max(part._indices.column(0)).as_py() >= len(part.data):
            raise IndexError(f"an index is beyond the {len(part.data)} rows")
    return parts


def _opened(file: Path, most: int) -> pa.Table:
    """One file, of either format."""
    reader = pa.ipc.open_stream(arrow.ipc_stream(file))
    return pa.Table.from_batches(arrow.bounded(reader, most, f"'{file}'"), reader.schema)


class Hub(StoredSource):
    """A data set of the Hugging Face hub, downloaded once, then read column by column from its cache."""

    short_name: ClassVar[str] = "hub"
    pip_extra: ClassVar[str] = "hub"

    repository: str = Field(description="name on the hub, e.g. uoft-cs/cifar100")
    config: str | None = Field(default=None, description="configuration of the data set, where it has several")
    revision: str | None = Field(default=None, description="commit or tag; fix it, or the data may change")
    splits: dict[str, str] = Field(
        default_factory=dict, description="our split -> its name on the hub, e.g. {validation: 'train[90%:]'}"
    )
    id: str | None = Field(
        default=None, description="column that identifies an item; without it an id is repository, split and row"
    )

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The table of one split; downloads it if it is not in the cache of ``datasets``."""
        with brought_by("hub"):
            import datasets  # takes a second, and most runs do not need it

        data = self._loaded(self.splits.get(split, split), name)
        return SplitTable.of_parts(
            data,
            lambda: self._loaded(None, name).values(),
            where=self.repository,
            split=split,
            stamp=fingerprint_of(self.repository, self.config, self.revision, data._fingerprint),
            ids=self.id,
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
