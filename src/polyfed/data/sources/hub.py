"""A data set of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from polyfed.core.errors import DataError
from polyfed.data.arrow import dataset_column, fingerprint_of, joined
from polyfed.data.tables import SplitTable, StoredSource


class Hub(StoredSource):
    """A data set of the Hugging Face hub, downloaded once, then read column by column from its cache."""

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
