"""The page as a whole: one file that loads nothing, works offline and may be mailed."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from polyfed.core.files import write_atomically
from polyfed.reporting.charts import FigureSheet
from polyfed.reporting.curves import client_charts, group_colour, recorded_charts, server_charts
from polyfed.reporting.html import svg
from polyfed.reporting.html.clients import clients_page_table
from polyfed.reporting.html.events import events_charts, happenings, timeline
from polyfed.reporting.html.images import map_parts
from polyfed.reporting.html.overview import page_head
from polyfed.reporting.html.page_tables import chart_values, columns_table, holdings_table, page_tables
from polyfed.reporting.markup import html_templates, resource
from polyfed.reporting.partition_charts import MOST_BARS, class_strengths, group_charts
from polyfed.reporting.partition_tables import Held, classes_of, groups_of, sources_of
from polyfed.reporting.report import clients_table, server_tables
from polyfed.reporting.saved_tables import leakage_parts
from polyfed.reporting.teacher import teacher_table
from polyfed.reporting.traffic import BYTE_DIRECTIONS, seconds_chart, sent_chart, traffic_bars
from polyfed.reporting.weights import weight_charts
from polyfed.runs.config_files import with_paths
from polyfed.runs.records import RunRecords

if TYPE_CHECKING:
    from jinja2 import Environment

_MOST_SWATCHES = 30


class PageSection(NamedTuple):
    """A section of the page, shown by the macro with its id; left out, also of the menu, if it has no content."""

    id: str
    title: str
    content: dict[str, Any]


def write_html_report(records: RunRecords, out: Path | None = None) -> Path:
    """Write the report as one HTML file; equal records give equal bytes.

    Args:
        records: of a run, finished or not.
        out: the file, by default ``report.html`` in the run folder.

    Returns:
        The file.

    Raises:
        RunError: environment or arrays of the run are damaged.
        OSError: the file cannot be written; nothing of it is left then.
    """
    path = records.folder / "report.html" if out is None else out
    write_atomically(path, html_report(records).encode())
    return path


def html_report(records: RunRecords) -> str:
    """The whole page as text.

    Raises:
        RunError: environment or arrays of the run are damaged.
    """
    head = page_head(records)
    return rendered_page("page.html.j2", title=head["title"], head=head, sections=_sections(records))


def notebook_html(sheet: FigureSheet) -> str:
    """A figure for a notebook: a page in a frame of its own, so that styles of neither reach the other."""
    # the page becomes an attribute: autoescape quotes it, the browser unquotes it
    page = rendered_page("notebook.html.j2", title=sheet.title, rows=sheet.rows)
    height = 60 + 420 * len(sheet.rows)
    return page_templates().get_template("frame.html.j2").render(page=page, title=sheet.title, height=height)


def content_policy(script: str, form_action: str = "'none'") -> str:
    """What the page may load and run: styles within it, images within it, and this one script; where forms go."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        f"base-uri 'none'; form-action {form_action}"
    )


@functools.cache
def page_templates() -> Environment:
    """Templates of a page, with the filters that turn charts into what is drawn."""
    templates = html_templates()
    filters = (svg.svg_parts, map_parts, chart_values)
    templates.filters |= {function.__name__: function for function in filters}
    templates.globals["directions"] = list(BYTE_DIRECTIONS.values())
    templates.filters["kind"] = lambda chart: type(chart).__name__
    # the drawing and its axes must agree on the margins
    templates.globals |= {name: getattr(svg, name) for name in ("WIDTH", "HEIGHT", "LEFT", "RIGHT", "TOP", "BOTTOM")}
    return templates


def rendered_page(template: str, *, form_action: str = "'none'", **content: Any) -> str:
    """A page of one of the templates, with its style and script in it; forms, if any, go to ``form_action``."""
    from markupsafe import Markup

    # the policy names the script by its hash, so that text which slipped through as a script would not run
    script = resource("script.js")
    content |= {
        "policy": content_policy(script, form_action),
        "script": Markup(script),
        "style": Markup(resource("style.css")),
    }
    return page_templates().get_template(template).render(content)


def _sections(records: RunRecords) -> list[PageSection]:
    kinds = ("test", "validation")
    events = happenings(records)
    # reports are passed on, and where data lie on this machine is nobody's business
    shown = with_paths(records.config, lambda path: Path("...", path.name))
    config = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100)
    contents: dict[tuple[str, str], dict[str, Any]] = {
        ("server", "Server"): {
            "charts": server_charts(records),
            "tables": page_tables(
                [*(table for kind in kinds for table in server_tables(records, kind)), teacher_table(records)]
            ),
            "recorded": recorded_charts(records),
        },
        ("curves", "Client curves"): {
            "charts": client_charts(records),
            "tables": page_tables([clients_table(records, "test")]),
        },
        ("partition", "Partition"): {
            "groups": [_group(records, *group) for group in groups_of(records.holdings).items()]
        },
        ("traffic", "Bytes and time"): {
            "charts": [chart for chart in (sent_chart(records), seconds_chart(records)) if chart],
            "bars": traffic_bars(records) if records.transfers else (),
        },
        ("leakage", "What this run gave away"): {"tables": page_tables(leakage_parts(records))},
        ("weights", "Aggregation weights"): {"arrays": weight_charts(records)},
        ("clients", "Clients"): {"table": clients_page_table(records)},
        ("events", "Events"): {"charts": events_charts(events), "table": timeline(events)},
        ("configuration", "Configuration"): {"text": config if records.config else ""},
        ("reading", "How to read the figures"): {"always": True},
    }
    return [PageSection(*name, parts) for name, parts in contents.items() if any(parts.values())]


def _group(records: RunRecords, group: str, held: Held) -> dict[str, Any]:
    colour, classes, sources = group_colour(records, group), classes_of(held), sources_of(held)
    labels = f"{len(classes)} classes" if classes else "no labels" if sources else "samples alone are known"
    number = f"{len(held)} client{'s' if len(held) > 1 else ''}"
    # only the bars of single clients have a part for each class
    swatches = len(held) <= MOST_BARS and len(classes) <= _MOST_SWATCHES
    return {
        "title": f"{group}: {number}, {labels} ({', '.join(sources) or 'held at its site'})",
        "charts": group_charts(group, held, colour),
        "colour": colour,
        "swatches": class_strengths(classes) if swatches else {},
        "tables": {"Table": holdings_table(group, held), "Table by column": columns_table(group, held)},
    }
