"""Figures without a display: style, colours that colour-blind readers distinguish, PNG, and SVG for pages."""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from polyfed.core.files import write_atomically
from polyfed.reporting.markup import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

P = ParamSpec("P")
R = TypeVar("R")

# Okabe and Ito (2008), without yellow, which is too faint on white
INK, GREY, PAPER, GRID = "#16202c", "#566273", "#ffffff", "#d9dee5"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)
ROLES = {"own": COLOURS[1], "rival": COLOURS[0], "control": GREY, "ceiling": COLOURS[2]}
"""Role of a method in a comparison -> its colour in every figure."""
ROLES_IN_WORDS = "orange: the method, blue: rivals, grey: controls, green: ceilings"
VARIABLES = {INK: "ink", GREY: "muted", PAPER: "surface", GRID: "edge", COLOURS[0].lower(): "blue"}  # of style.css
SEQUENTIAL = "cividis"
_BELOW = "below"  # id of legends that are placed below their axes
_MOST_PIXELS = 60_000  # per side; Agg draws 65,535
_HOVER = "hover:"  # begins the ids of artists whose text a browser shows under the pointer

_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # texts stay texts: found by a search, read aloud, and small
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # every text of an SVG names them all
    "text.parse_math": False,  # names of classes and metrics are shown as they are; one with a $ would end the drawing
}


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function in this package's style, without changing matplotlib's settings.

    All parts of the figure that it returns are laid out, as all labels are known then.
    """

    @functools.wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        import matplotlib as mpl
        from matplotlib.figure import Figure

        with mpl.rc_context(_STYLE):
            drawn = draw(*args, **kwargs)
            if isinstance(drawn, Figure):
                settle(drawn)
            return drawn

    return wrapped


def empty_figure(width: float, height: float, title: str = "") -> Figure:
    """A figure of a size in inches, without axes and without any global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # pyplot would keep every figure alive and pick a backend that may want a display
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(printable(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def figure_grid(
    rows: int, columns: int, *, width: float = 5.0, height: float = 3.6, title: str = ""
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row; ``width`` and ``height`` are inches of one axes."""
    figure = empty_figure(width * columns, height * rows, title)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


@styled
def png_bytes(figure: Figure) -> bytes:
    """Content of a PNG file of the figure."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    settle(figure)
    figure.set_dpi(min(130.0, _MOST_PIXELS / max(figure.get_size_inches())))
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()  # once: ``savefig`` would draw the figure before that to find its layout
    # into memory first: an error in drawing must not leave half a file
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).save(buffer, format="png")
    return buffer.getvalue()


@styled
def svg_text(figure: Figure, label: str) -> str:
    """The figure as an SVG element for a page, next to any others; ``label`` is its text for screen readers."""
    from html import escape

    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    settle(figure)
    buffer = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    # equal figures have equal bytes, and ids that no other figure of the page has
    with mpl.rc_context({"svg.hashsalt": label}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has fonts of its own
        canvas.print_svg(buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    element = buffer.getvalue().partition("<svg")[2]
    # ids of groups would repeat those of other figures on the page; texts are escaped, so none looks like a group
    element = re.sub(r'<g id="([^"]*)">', lambda group: f"<g>{_hover_title(group[1])}", element)
    for colour, variable in VARIABLES.items():  # in dark mode a page has others
        element = re.sub(f'(?<=[le]: ){colour}(?=[;"])', f"var(--{variable}, {colour})", element)
    return printable(f'<svg role="img" aria-label="{escape(label)}"{element}')


def hover_id(text: str) -> str:
    """Id of an artist (``gid`` in matplotlib) whose text a browser shows under the pointer."""
    return f"{_HOVER}{text}"


def show_on_hovering(
    axes: Axes, box: tuple[float, float, float, float], text: str, transform: Transform | None = None
) -> None:
    """Show a text under the pointer in a box (left, lower end, width, height), by default in data coordinates."""
    from matplotlib.patches import Rectangle

    left, low, width, height = box
    where: Any = {} if transform is None else {"transform": transform}
    area = Rectangle((left, low), width, height, alpha=0, gid=hover_id(text), **where)
    area.set_in_layout(False)
    axes.add_artist(area)


def _hover_title(group: str) -> str:
    return f"<title>{group.removeprefix(_HOVER)}</title>" if group.startswith(_HOVER) else ""


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` as a PNG file, complete or not at all; returns ``path``."""
    write_atomically(path, png_bytes(figure))
    return path


def legend_below(axes: Axes, columns: int, **how: Any) -> None:
    """A legend below the axes and their labels, which covers neither data nor text; ``how`` as for ``Axes.legend``.

    ``settle`` places it, since labels of ticks may be added later.
    """
    axes.legend(loc="upper left", ncols=columns, columnspacing=1.2, handlelength=1.6, **how).set_gid(_BELOW)


def settle(figure: Figure) -> None:
    """Lay out legends, axes and all other parts for the last time."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.transforms import Bbox

    engine = figure.get_layout_engine()
    if not isinstance(engine, ConstrainedLayoutEngine):
        return
    _settle_legends(figure)
    engine.execute(figure)
    figure.set_layout_engine("none")
    # the last digits of the layout's solver vary from call to call, and equal figures are to have equal bytes
    for part in figure.subfigs:
        part.bbox_relative.set_points(part.bbox_relative.get_points().round(6))
    for axes in figure.axes:
        axes.set_position(Bbox(axes.get_position().get_points().round(6)))


def _settle_legends(figure: Figure) -> None:
    """Place legends below the ticks and the label of their x axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import ScaledTranslation

    legends = [(axes, axes.get_legend()) for axes in figure.axes]
    wanted = [(axes, legend) for axes, legend in legends if legend is not None and legend.get_gid() == _BELOW]
    if not wanted:
        return
    canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
    for axes, legend in wanted:
        renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
        labels = axes.xaxis.get_tightbbox(renderer)
        depth = 0.0 if labels is None else max(0.0, axes.bbox.y0 - labels.y0) / figure.dpi
        below = ScaledTranslation(0, -depth, figure.dpi_scale_trans)
        legend.set_bbox_to_anchor((-0.02, 0.0), transform=axes.transAxes + below)


def whole_rounds(axes: Axes) -> None:
    """Mark whole numbers only on the x axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
