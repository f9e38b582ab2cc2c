"""Heat maps for a page: an image, and the levels that a script needs to show other rounds and single values."""

from __future__ import annotations

import base64
import functools
import io
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.reporting.charts import HeatMap
from polyfed.reporting.figures import SEQUENTIAL
from polyfed.reporting.tables import count
from polyfed.reporting.weights import NAMED_ROWS

_NONE = 255  # level of a cell without a value; the others are spread over 0 to 254
_UNSEEN = (0, 0, 0)


def map_parts(chart: HeatMap) -> dict[str, Any]:
    """What the template shows of a map: the last round as an image, its rows and scale, and data for the script."""
    low, high = chart.scale
    levels = {number: _levels(frame.values, low, high) for number, frame in sorted(chart.frames.items())}
    palette = palette_bytes()
    frames = {
        number: {"rows": chart.frames[number].rows, "levels": _base64(grid.tobytes())}
        for number, grid in levels.items()
    }
    data = {"columns": chart.columns, "low": low, "high": high, "palette": _base64(palette), "frames": frames}
    most = max(len(frame.rows) for frame in chart.frames.values())
    return {
        "rounds": list(levels),
        "rows": chart.last.rows,
        "named": most <= NAMED_ROWS,
        "source": f"data:image/png;base64,{_base64(_png(levels[max(levels)]))}",
        # pixels: room for a name in each row, or less where there are too many for names
        "height": min(560, max(40, (18 if most <= NAMED_ROWS else 4) * most)),
        "ends": [count(end) if end == int(end) else f"{end:.3g}" for end in (low, high)],
        "stops": ",".join("rgb({},{},{})".format(*palette[3 * level : 3 * level + 3]) for level in range(0, _NONE, 42)),
        "data": json.dumps(data, separators=(",", ":")),
    }


@functools.cache
def palette_bytes() -> bytes:
    """Red, green and blue of each level; that of no value is transparent, so that a pattern shows through."""
    from matplotlib import colormaps

    colours = colormaps[SEQUENTIAL](np.linspace(0, 1, _NONE), bytes=True)[:, :3]
    return bytes([*colours.reshape(-1).tolist(), *_UNSEEN])


def _levels(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """Values as whole numbers from 0 to 254, ``_NONE`` where there is none."""
    finite = np.isfinite(values)
    # NaN would warn and cast to any level
    share = (np.where(finite, values, low) - low) / ((high - low) or 1.0)
    return np.where(finite, np.rint(share * (_NONE - 1)), _NONE).astype(np.uint8)


def _png(levels: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    image = Image.frombytes("P", (levels.shape[1], levels.shape[0]), levels.tobytes())
    # a palette: one byte a cell instead of three
    image.putpalette(palette_bytes())
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True, transparency=_NONE)
    return stream.getvalue()


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
