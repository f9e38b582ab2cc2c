"""Horizontal bars as tables: a heading, a bar of one or several parts, and its figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyfed.reporting.html.markup import Markup, tag


@dataclass(frozen=True)
class Segment:
    """A piece of a bar: how long, what it stands for, its colour, and how strong that is (0 to 1)."""

    value: float
    label: str
    colour: int
    strength: float = 1.0


def bar_table(caption: str, rows: Mapping[str, Sequence[Segment]], figures: Mapping[str, str], heading: str) -> Markup:
    """One bar a row, all on one scale from zero.

    Args:
        caption: what the bars show.
        rows: heading of a row -> parts of its bar.
        figures: heading of a row -> what stands behind the bar.
        heading: what the rows are.
    """
    longest = max((sum(part.value for part in parts) for parts in rows.values()), default=0.0) or 1.0
    body = [
        tag(
            "tr",
            tag("th", name, scope="row", title=name),
            tag("td", tag("div", [_part(part, longest) for part in parts if part.value > 0], class_="track")),
            tag("td", figures[name], class_="number"),
        )
        for name, parts in rows.items()
    ]
    head = tag("tr", tag("th", heading, scope="col"), tag("th", "share", scope="col"), tag("th", "amount", scope="col"))
    return tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", head, class_="unseen"),
        tag("tbody", body),
        class_="bars",
    )


def _part(part: Segment, longest: float) -> Markup:
    style = f"width:{100 * part.value / longest:.3g}%"
    strength = f";--strength:{100 * part.strength:.0f}%" if part.strength < 1 else ""
    return tag("span", class_=f"part c{part.colour}", style=style + strength, title=part.label)
