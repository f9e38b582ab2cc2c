"""Maps of samples as several participants represent them: drawn, saved, and read again without any model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
from jaxtyping import Float
from torch import Tensor

from polyfed.core.errors import RunError
from polyfed.core.untrusted import file_json
from polyfed.lab.analysis.drawing import bare_map, cycled
from polyfed.reporting.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class DriftMap:
    """A map of one modality.

    Attributes:
        modality: its name.
        names: of the m participants on it.
        groups: of the participants; None: the server.
        points: their samples, the same few of each.
    """

    modality: str
    names: Sequence[str]
    groups: Sequence[str | None]
    points: Float[Tensor, "m k 2"]

    def draw(self, axes: Axes) -> None:
        """A colour and marker for each client; the server in black."""
        for place, points in enumerate(self.points):
            # the last colour is black, which is the server's
            is_server = self.groups[place] is None
            look: Any = {"color": "black", "marker": "x"} if is_server else cycled(place, COLOURS[:6])
            axes.scatter(points[:, 0], points[:, 1], s=9, linewidths=0.6, label=self.names[place], **look)
        bare_map(axes)


def saved_maps(folder: Path, stem: str) -> list[DriftMap]:
    """Those of an analysis of drift that was saved; none where it was not.

    Raises:
        RunError: its files are damaged.
    """
    if not (folder / f"{stem}.safetensors").is_file():
        return []
    try:
        content = file_json((folder / f"{stem}.json").read_bytes())["modalities"]
        points = safetensors.torch.load((folder / f"{stem}.safetensors").read_bytes())
        return [_read(name, each, points[name]) for name, each in content.items()]
    except (OSError, ValueError, KeyError, IndexError, TypeError, safetensors.SafetensorError) as error:
        raise RunError(f"'{folder / stem}' is damaged ({error}); delete the run's folder to run it again") from error


def _read(modality: str, content: Mapping[str, Any], points: Tensor) -> DriftMap:
    names, groups = ([content[key][place] for place in content["mapped"]] for key in ("participants", "groups"))
    return DriftMap(modality, names, groups, points)
