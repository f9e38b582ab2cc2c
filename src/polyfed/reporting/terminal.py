"""The terminal that tables, bars and reports are printed on."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from polyfed.core.untrusted import plain
from polyfed.reporting.fitted_tables import FittedTable
from polyfed.reporting.tables import TextTable


class Terminal(Console):
    """A console on which nothing that is shown has an effect, whoever wrote it; colours and bars are rich's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of text and style; control codes are segments of their own, and come from rich alone."""
        for segment in super().render(renderable, options):
            # line breaks are rich's; all other control characters in a text are somebody else's
            harmless = segment.control or segment.text.isprintable()
            yield segment if harmless else Segment("\n".join(map(plain, segment.text.split("\n"))), segment.style)

    def print_tables(self, tables: Iterable[TextTable]) -> None:
        for table in tables:
            self.print(FittedTable(table))
