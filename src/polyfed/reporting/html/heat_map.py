"""Heat maps: an image within the page, and the levels that a script needs to show other rounds and single values."""

from __future__ import annotations

import base64
import functools
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyfed.reporting.figures import SEQUENTIAL
from polyfed.reporting.html.markup import Markup, tag
from polyfed.reporting.tables import count

_NONE = 255  # level of a cell without a value; the others are spread over 0 to 254
NAMED_ROWS = 40  # up to so many rows have their names beside them
_UNSEEN = (0, 0, 0)

Levels = NDArray[np.uint8]


@dataclass(frozen=True)
class Frame:
    """Values of one round.

    Attributes:
        rows: name of each row.
        values: [rows, columns]; NaN where there is no value.
    """

    rows: Sequence[str]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class HeatMap:
    """Values of several rounds on one scale.

    Attributes:
        title: what the colours mean.
        frames: round -> its values; all have the same columns.
        column: what a column is.
        columns: name of each column, for the pointer.
    """

    title: str
    frames: Mapping[int, Frame]
    column: str
    columns: Sequence[str]

    def drawn(self, note: str = "") -> Markup:
        """The last round as an image, with a slider if there are more."""
        low, high = self._range()
        levels = {number: _levels(frame.values, low, high) for number, frame in self.frames.items()}
        last = max(levels)
        rows = self.frames[last].rows
        image = tag(
            "img",
            src=_data_url(levels[last]),
            alt=f"{self.title}: {len(rows)} rows by {len(self.columns)} columns, round {last}",
            style=f"height:{_height(max(len(frame.rows) for frame in self.frames.values()))}px",
        )
        return tag(
            "figure",
            tag("figcaption", self.title),
            _slider(sorted(levels)) if len(levels) > 1 else None,
            tag("div", self._names(rows), tag("div", image, class_="map"), class_="heat"),
            tag("p", self.column, class_="axis"),
            _scale(low, high),
            tag("p", note, class_="note") if note else None,
            class_="chart wide",
            data_heat=self._data(levels, low, high),
        )

    def _range(self) -> tuple[float, float]:
        finite = np.concatenate([frame.values[np.isfinite(frame.values)] for frame in self.frames.values()])
        return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)

    def _names(self, rows: Sequence[str]) -> Markup | None:
        """Beside the image, where there is room for all names of every round."""
        if any(len(frame.rows) > NAMED_ROWS for frame in self.frames.values()):
            return None
        return tag("div", [tag("span", name) for name in rows], class_="rows", aria_hidden="true")

    def _data(self, levels: Mapping[int, Levels], low: float, high: float) -> str:
        frames = {
            number: {"rows": self.frames[number].rows, "levels": base64.b64encode(grid.tobytes()).decode()}
            for number, grid in levels.items()
        }
        palette = base64.b64encode(bytes(palette_bytes())).decode()
        data = {"columns": self.columns, "low": low, "high": high, "palette": palette, "frames": frames}
        return json.dumps(data, separators=(",", ":"))


def _height(rows: int) -> int:
    """Pixels: room for a name in each row, or less where there are too many for names."""
    return min(560, max(40, (18 if rows <= NAMED_ROWS else 4) * rows))


def _levels(values: NDArray[np.float64], low: float, high: float) -> Levels:
    """Values as whole numbers from 0 to 254, ``_NONE`` where there is none."""
    known = np.isfinite(values)
    share = (np.where(known, values, low) - low) / ((high - low) or 1.0)
    return np.where(known, np.rint(share * (_NONE - 1)), _NONE).astype(np.uint8)


@functools.cache
def palette_bytes() -> tuple[int, ...]:
    """Red, green and blue of each level; that of no value is transparent, so that a pattern shows through."""
    from matplotlib import colormaps

    colours = colormaps[SEQUENTIAL](np.linspace(0, 1, _NONE), bytes=True)[:, :3]
    return (*(int(part) for part in colours.reshape(-1)), *_UNSEEN)


def _data_url(levels: Levels) -> str:
    from PIL import Image

    image = Image.frombytes("P", (levels.shape[1], levels.shape[0]), levels.tobytes())
    image.putpalette(palette_bytes())
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True, transparency=_NONE)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _slider(rounds: Sequence[int]) -> Markup:
    end = len(rounds) - 1
    control = tag("input", type="range", min=0, max=end, value=end, data_rounds=json.dumps(rounds))
    return tag("label", "round ", tag("output", rounds[-1]), control, class_="slider scripted")


def _scale(low: float, high: float) -> Markup:
    colours = palette_bytes()
    stops = ",".join("rgb({},{},{})".format(*colours[3 * level : 3 * level + 3]) for level in range(0, _NONE, 42))
    ramp = tag("span", class_="ramp", style=f"background:linear-gradient(90deg,{stops})", aria_hidden="true")
    return tag("div", tag("span", _number(low)), ramp, tag("span", _number(high)), class_="scale")


def _number(value: float) -> str:
    return count(value) if value == int(value) else f"{value:.3g}"
