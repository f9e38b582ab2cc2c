"""The terminal that tables, bars and reports are printed on."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from polyfed.core.untrusted import plain


class Terminal(Console):
    """A console on which nothing that is shown has an effect, whoever wrote it; colours and bars are rich's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of text and style; control codes are segments of their own, and come from rich alone."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(_shown(segment.text), segment.style)


def _shown(text: str) -> str:
    return text if text.isprintable() else "\n".join(map(plain, text.split("\n")))
