"""Maps of samples as several participants represent them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

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
