"""Reports of a run: ``report.md``, and a page that loads nothing, runs no code, works offline and, without samples of
the test data, may be mailed."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from polyfed.core.files import write_atomically
from polyfed.core.untrusted import plain
from polyfed.reporting.charts import FigureSheet
from polyfed.reporting.markup import GalleryEntry, html_templates, markdown_templates, resource
from polyfed.reporting.metrics import EVALUATIONS, spreads_json
from polyfed.reporting.run_figures import run_figures
from polyfed.reporting.run_tables import (
    bytes_table,
    clients_page_table,
    clients_table,
    incidents_table,
    leakage_tables,
    partition_tables,
    recorded_accounts,
    server_tables,
    tables,
    teacher_table,
    traffic_table,
)
from polyfed.reporting.summary import RunSummary
from polyfed.reporting.tables import TextTable, duration
from polyfed.runs.config_files import with_paths
from polyfed.runs.records import RunRecords

if TYPE_CHECKING:
    from jinja2 import Environment

_MOST_CELLS = 15_000  # a hundred classes of a thousand clients would fill most of the page
_NUMBERS = {"", *"0123456789+-"}  # first characters of numbers
# text that slipped through as a script would not run, and nothing can be fetched
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
)


Samples = Sequence[Sequence[GalleryEntry]]
"""Samples of the data, each a row of entries."""


@dataclass(frozen=True)
class PageSection:
    """A section of the page; left out, also of the menu, if it has no content.

    Attributes:
        id: Id of the element.
        title: Heading.
        figures: Figures at the top.
        tables: Tables below them, open.
        folded: Summary -> figures and tables that appear when it is opened.
        text: Preformatted text, folded.
        samples: Samples of the data.
    """

    id: str
    title: str
    figures: Sequence[FigureSheet] = ()
    tables: Sequence[TextTable] = ()
    folded: Mapping[str, Sequence[FigureSheet | TextTable]] = field(default_factory=dict)
    text: str = ""
    samples: Samples = ()

    def __bool__(self) -> bool:
        return bool(self.figures or self.tables or any(self.folded.values()) or self.text or self.samples)


def write_report(records: RunRecords) -> Path:
    """Write ``report.md``, and ``client_spread.json`` if clients were measured; returns the former."""
    from markupsafe import Markup

    seconds = sum(records.seconds.values())
    took = f" in {duration(seconds)}" if seconds else ""
    summary = RunSummary(records)
    shown, results = (*tables(records), *recorded_accounts(records.folder)), summary.results_table
    text = (
        markdown_templates()
        .get_template("report.md.j2")
        .render(
            title=f"{records.name}: {records.rounds} rounds{took}, {len(records.clients)} clients",
            summary=summary,
            chart=(records.folder / "plots" / "gain.png").is_file(),
            results=results.rows and Markup(results.markdown()),
            steps=[Markup(plain(command)) for _, command in summary.next_steps()],  # code, which knows no escapes
            tables=[Markup(table.markdown()) for table in shown if table.rows],
        )
    )
    path = records.folder / "report.md"
    write_atomically(path, text.encode())
    if spreads := spreads_json(records):
        # JSON has no NaN: of a metric that no client has a finite value of, numbers are null
        content = json.loads(json.dumps(spreads), parse_constant=lambda _: None)
        write_atomically(records.folder / "client_spread.json", (json.dumps(content, indent=1) + "\n").encode())
    return path


def write_html_report(
    records: RunRecords,
    out: Path | None = None,
    *,
    figures: Mapping[str, FigureSheet] | None = None,
    samples: Samples = (),
) -> Path:
    """Write the report as one HTML file; equal records give equal bytes.

    Args:
        records: Records of a run, finished or not.
        out: The file, by default ``report.html`` in the run folder.
        figures: Result of ``run_figures``; None computes it, an empty mapping leaves figures out.
        samples: Test data to be shown: the page must then stay where these may be.

    Returns:
        The file.

    Raises:
        RunError: The environment or the leakage analysis of the run is damaged.
        OSError: The file cannot be written; nothing of it is left then.
    """
    path = records.folder / "report.html" if out is None else out
    write_atomically(path, html_report(records, figures=figures, samples=samples).encode())
    return path


def html_report(records: RunRecords, *, figures: Mapping[str, FigureSheet] | None = None, samples: Samples = ()) -> str:
    """The page as text.

    Raises:
        RunError: The environment or the leakage analysis of the run is damaged.
    """
    figures = run_figures(records) if figures is None else figures
    summary, sections = RunSummary(records), _sections(records, figures, samples)
    drawn, results = [figures[name] for name in figures if name == "gain"], _filled(summary.results_table)
    first = PageSection("gain", "What training together brings", drawn, results)
    content = {"first": first, "sections": sections, "figures": bool(figures)}
    return rendered_page("page.html.j2", title=summary.title, head=summary, **content)


@functools.cache
def page_templates() -> Environment:
    """Templates of a page, with the filter that turns a figure into its SVG."""
    from markupsafe import Markup

    templates = html_templates()
    # matplotlib escapes text in it
    templates.filters["svgs"] = lambda figure: map(Markup, figure.svgs)
    templates.filters["numeric"] = _numeric
    return templates


def rendered_page(template: str, **content: Any) -> str:
    """A page of one of the templates, with its style in it."""
    from markupsafe import Markup

    content |= {"policy": _POLICY, "style": Markup(resource("style.css"))}
    return page_templates().get_template(template).render(content)


def _sections(records: RunRecords, figures: Mapping[str, FigureSheet], samples: Samples) -> list[PageSection]:
    # reports are passed on, so they must not reveal paths of this machine
    shown = with_paths(records.config, lambda path: Path("...", path.name))
    config = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100) if records.config else ""

    def drawn(*names: str) -> list[FigureSheet]:
        return [figures[name] for name in names if name in figures]

    servers = [table for split in EVALUATIONS for table in server_tables(records, split)]
    of_server = {"Tables: the model, the last round, chance": _filled(*servers)}
    inner: dict[str, Sequence[FigureSheet | TextTable]] = {
        "What the clients teach the server": _filled(teacher_table(records)),
        "What the method recorded, by round": drawn("recorded"),
    }
    of_clients = {"Table: mean, worst client, disparity": _filled(clients_table(records, "test"))}
    of_partition = {"Tables: sizes, columns, classes": _filled(*partition_tables(records.holdings))}
    of_partition |= {"Table: what was read of the data": _filled(*recorded_accounts(records.folder))}
    of_traffic = {"Tables: totals, steps and bundles": _filled(traffic_table(records), bytes_table(records))}
    of_leakage = {"Attacks on what clients sent, and on the models": _filled(*leakage_tables(records))}
    sections = [
        PageSection("server", "Server", drawn("server"), folded=of_server),
        PageSection("samples", "Test samples", samples=samples),
        PageSection("curves", "Client curves", drawn("clients"), folded=of_clients),
        PageSection("partition", "Partition", drawn("partition"), folded=of_partition),
        PageSection("traffic", "Communication", drawn("traffic"), folded=of_traffic),
        PageSection("leakage", "What this run leaked", folded=of_leakage),
        PageSection("clients", "Clients", tables=_filled(clients_page_table(records))),
        PageSection("inner", "Inside the method", folded=inner),
        PageSection("events", "Events", tables=_filled(incidents_table(records))),
        PageSection("configuration", "Configuration", text=config),
    ]
    return [section for section in sections if section]


def _filled(*tables: TextTable) -> list[TextTable]:
    """Tables with rows, shortened to what a page can hold."""
    return [_shortened(table) for table in tables if table.rows]


def _shortened(table: TextTable) -> TextTable:
    most = max(1, _MOST_CELLS // len(table.columns))
    if len(table.rows) <= most:
        return table
    title = f"{table.title} (the first {most:,} of {len(table.rows):,} rows)"
    return replace(table, title=title, rows=table.rows[:most])


def _numeric(table: TextTable) -> list[bool]:
    """True for each column of numbers, which are right-aligned."""
    columns = range(len(table.columns))
    return [bool(index) and all(row[index][:1] in _NUMBERS for row in table.rows) for index in columns]
