"""A data set of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from polyfed.core.errors import DataError
from polyfed.data.arrow import fingerprint_of, split_of_table
from polyfed.data.source import Split, TableSource


class Hub(TableSource):
    """A data set of the Hugging Face hub, downloaded once, then read column by column from its cache."""

    identified_by: ClassVar[frozenset[str] | None] = frozenset({"repository", "config"})

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

    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        """Open one split; downloads it if it is not in the cache of ``datasets``."""
        data = self._loaded(self.splits.get(split, split), name)

        def read(columns: list[str]) -> pa.Table:
            if not columns:  # a table without columns has no rows to count
                return pa.table({"": pa.nulls(len(data))})
            table: pa.Table = data.select_columns(columns).with_format("arrow")[:]
            return table

        return split_of_table(
            read,
            data.features.arrow_schema,
            source=name,
            split=split,
            ids_column=self.id,
            columns=self.columns,
            targets=self.targets,
            selection=self.selection(),
            fingerprint=fingerprint_of(self.repository, self.config, self.revision, data._fingerprint),
            where=self.repository,
            everywhere=lambda column: self._everywhere(column, name),
            folder=self._downloads(),
        )

    def _everywhere(self, column: str, name: str) -> pa.ChunkedArray:
        splits = self._loaded(None, name).values()
        tables = [data.select_columns([column]).with_format("arrow")[:] for data in splits]
        return pa.concat_tables(tables).column(column)

    def _downloads(self) -> Path:
        """Where ``datasets`` keeps what it downloads, pictures among it."""
        import datasets

        return Path(datasets.config.HF_CACHE_HOME)

    def _loaded(self, split: str | None, name: str) -> Any:
        """One split, or with None all of them by name."""
        import datasets  # takes a second, and most runs do not need it
        from huggingface_hub import constants

        constants.HF_HUB_DISABLE_TELEMETRY = True
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        try:
            return datasets.load_dataset(self.repository, self.config, split=split, revision=self.revision)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"source '{name}': cannot load '{self.repository}' (config {self.config}, split '{split}'): "
                f"{reason}; check names and connection, or use a local 'parquet' source"
            ) from error
