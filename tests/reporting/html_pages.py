"""Pages of the HTML report, read as a browser reads them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import yaml

from polyfed.reporting.page import html_report, page_templates
from polyfed.runs.records import RunRecords

MENU = ["server", "curves", "partition", "traffic", "clients", "inner", "events", "configuration", "reading"]
ALL_PARTS = ["gain", "facts", "next", *MENU]


class Page(HTMLParser):
    """A page as it is read: elements with attributes and text; raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.within: list[str] = []  # the element of each text
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, name, attributes):
        assert len({key for key, _ in attributes}) == len(attributes), f"doubled attribute in <{name}>"
        self.elements.append((name, dict(attributes)))
        if name not in {"meta", "img", "input", "br"}:
            self.stack.append(name)

    def handle_endtag(self, name):
        assert self.stack.pop() == name

    def handle_data(self, data):
        if not {"script", "style"} & set(self.stack):
            self.texts.append(data)
            self.within.append(self.stack[-1] if self.stack else "")

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for result, attributes in self.elements if result == name]

    @property
    def parts(self) -> list[str | None]:
        return [attributes["id"] for attributes in self.of("section")]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def titles(self) -> list[str]:
        """Texts of the drawings on hovering."""
        return [text for text, within in zip(self.texts, self.within, strict=True) if within == "title"][1:]

    @property
    def series(self) -> dict[str, list[float]]:
        """Label -> its values by round, as the charts show them on hovering."""
        result: dict[str, list[float]] = {}
        for title in self.titles:
            for line in title.split("\n")[1:] if title.startswith("round ") else ():
                label, _, value = line.rpartition(": ")
                result.setdefault(label, []).append(float(value.replace(",", "")))
        return result


def page_of(folder: Path) -> Page:
    return Page(html_report(RunRecords.load(folder)))


def rendered(template: str, **content: object) -> Page:
    """A page of nothing but this template."""
    return Page(page_templates().from_string(template).render(**content))


def titles_of(svg: str) -> list[str]:
    """Texts of a drawing on hovering."""
    from xml.etree import ElementTree

    return [title.text or "" for title in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]


def complete(folder: Path) -> Path:
    """The run folder, with all content of a page."""
    environment = {"python": "3.11.7", "device": "cpu", "versions": {"polyfed": "0.1.0", "torch": "2.13.0"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    settings = {"name": "my run", "description": "What it is for.", "algorithm": {"name": "creamfl"}}
    settings |= {"run": {"seed": 7, "rounds": 12}, "clients": {"image": {}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    line = {"participant": "server", "kind": "train"}
    with (folder / "metrics.jsonl").open("a") as log:
        log.writelines(json.dumps(line | {"round": k, "metrics": {"teacher.norm": 2.0 * k}}) + "\n" for k in (1, 2, 3))
    return folder
