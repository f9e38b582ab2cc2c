"""Rows without content, in given numbers: for what depends on numbers alone, where the data are not at hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from PIL import Image
from pydantic import Field

from polyfed.data.arrow import fingerprint_of
from polyfed.data.sounds import wav
from polyfed.data.tables import SplitTable, TableSource

Content = Literal["picture", "text", "texts", "sound", "number", "numbers"] | Annotated[int, Field(ge=1)]

_RATE = 8000
_SIDE = 32  # pixels; views resize them


class Blank(TableSource):
    """Grey pictures, one text again and again, silence, zeros, and classes in turn; every split has as many rows."""

    rows: int = Field(ge=1, description="items of each split")
    content: dict[str, Content] = Field(
        description="column -> picture, text, texts (``entries`` of them), sound, number, numbers; or how many classes"
    )
    entries: int = Field(default=5, ge=1, description="texts of an item in a column of texts")

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """A split; there is every split that is asked for."""
        columns = {column: self._values(kind) for column, kind in self.content.items()}
        stamp = fingerprint_of("blank", self.model_dump_json(), split)
        return SplitTable(
            read=lambda column: pa.chunked_array([columns[column]]),
            count=lambda: self.rows,
            schema=pa.schema([(column, values.type) for column, values in columns.items()], metadata=self._names()),
            where=name,
            split=split,
            fingerprint=stamp,
            recipe=stamp,
        )

    def _names(self) -> dict[str, str]:
        counts = {column: kind for column, kind in self.content.items() if isinstance(kind, int)}
        features = {
            column: {"_type": "ClassLabel", "names": [f"class {number}" for number in range(kind)]}
            for column, kind in counts.items()
        }
        return {"huggingface": json.dumps({"info": {"features": features}})}

    def _values(self, kind: Content) -> pa.Array:
        if isinstance(kind, int):
            return pa.array([row % kind for row in range(self.rows)], pa.int64())
        text = "a text of seven words in all"
        values: dict[str, Any] = {
            "text": text,
            "texts": [text] * self.entries,
            "picture": {"bytes": _grey(), "path": "blank.png"},
            "sound": {"bytes": wav(np.zeros(_RATE, np.float32), _RATE), "path": "blank.wav"},
            "number": 0.0,
            "numbers": [0.0] * self.entries,
        }
        return pa.array([values[kind]] * self.rows)


def _grey() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), (128, 128, 128)).save(file, "PNG")
    return file.getvalue()
