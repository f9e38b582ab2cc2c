"""Data that a Python process holds and has registered under a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from polyfed.core.errors import DataError, nearest
from polyfed.data.arrow import fingerprint_of, joined
from polyfed.data.registered import digest_of_registered, registered_data
from polyfed.data.tables import SplitTable, StoredSource


class Memory(StoredSource):
    """Data of this Python process, such as a notebook's: a ``datasets.Dataset``, a pandas frame, a list of rows.

    ``polyfed.register_data(NAME, DATA)`` puts them there. A run with them can be resumed, evaluated and exported with
    its data only where the same data are registered; engines of other processes (ray, flower) do not have them.
    """

    data: str = Field(description="name that the data were registered under in this process")
    digest: str | None = Field(
        default=None, description="of the content; null: that of what is registered when the settings are read"
    )
    id: str | None = Field(default=None, description="column that identifies an item; without it an id is its row")

    @model_validator(mode="before")
    @classmethod
    def _with_digest(cls, content: Any) -> Any:
        # written into the run folder, so that a resumed run finds out if it gets other data
        if isinstance(content, dict) and not content.get("digest") and isinstance(content.get("data"), str):
            return {**content, "digest": digest_of_registered(content["data"])}
        return content

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        held = registered_data(self.data)
        if self.digest is not None and self.digest != held.digest:
            digests = f"(digest {held.digest}, not {self.digest}); register the same data, or start a new run"
            what = f"the data registered as '{self.data}' are others than those of the experiment"
            raise DataError(f"source '{name}': {what} {digests}")
        if split not in held.splits:
            remedy = f"register them as {{'{split}': ..., ...}} or with a column 'split', or set fractions"
            hint = nearest(split, held.splits)
            raise DataError(f"source '{name}': data '{self.data}' have no split '{split}'; {hint}; {remedy}")

        return SplitTable(
            read=lambda column: held.column(split, column),
            count=lambda: len(held.splits[split]),
            schema=held.schema(split),
            where=f"memory:{self.data}",
            split=split,
            fingerprint=fingerprint_of("memory", held.digest),
            ids=self.id,
            everywhere=lambda column: joined(held.column(part, column) for part in held.splits),
            folder=Path("/"),  # whoever registers data here may name any file of this machine
        )
