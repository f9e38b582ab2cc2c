"""The page as a whole: one file that loads nothing, works offline and may be mailed."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from polyfed.core.files import write_atomically
from polyfed.reporting.html.clients import clients
from polyfed.reporting.html.curves import client_curves, server_curves
from polyfed.reporting.html.events import events
from polyfed.reporting.html.markup import Markup, tag
from polyfed.reporting.html.overview import cards, header, title
from polyfed.reporting.html.partition import partition
from polyfed.reporting.html.settings import configuration, explanation
from polyfed.reporting.html.traffic import traffic
from polyfed.reporting.html.weights import weights
from polyfed.runs.records import RunRecords


@dataclass(frozen=True)
class Section:
    """A section of the page; it is left out, also from the menu, if it has no content."""

    id: str
    title: str
    content: Markup


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
    parts = [part for part in _parts(records) if part.content]
    menu = tag("nav", [tag("a", part.title, href=f"#{part.id}") for part in parts], aria_label="Parts of the report")
    sections = [
        tag(
            "section",
            tag("h2", part.title, id=f"{part.id}-title"),
            part.content,
            id=part.id,
            aria_labelledby=f"{part.id}-title",
        )
        for part in parts
    ]
    main = tag("main", header(records), cards(records), menu, sections, id="top")
    script = _resource("script.js")
    body = tag("body", main, tag("script", Markup(script)))
    return f"<!DOCTYPE html>\n{tag('html', _head(title(records), script), body, lang='en')}\n"


def _parts(records: RunRecords) -> list[Section]:
    return [
        Section("server", "Server", server_curves(records)),
        Section("curves", "Client curves", client_curves(records)),
        Section("partition", "Partition", partition(records)),
        Section("traffic", "Bytes and time", traffic(records)),
        Section("weights", "Aggregation weights", weights(records)),
        Section("clients", "Clients", clients(records)),
        Section("events", "Events", events(records)),
        Section("configuration", "Configuration", configuration(records)),
        Section("reading", "How to read the figures", explanation()),
    ]


def _head(name: str, script: str) -> Markup:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=content_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{name} – polyfed report"),
        tag("style", Markup(_resource("style.css"))),
    )


def content_policy(script: str) -> str:
    """What the page may load and run: styles within it, images within it, and this one script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return resources.files("polyfed.reporting.html").joinpath(name).read_text("utf-8")
