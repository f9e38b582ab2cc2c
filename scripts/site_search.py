"""Pages of the site as Markdown, and their ranks among the hits of the site's search.

    python scripts/site_search.py                            # place of the answer to each question of the tests
    python scripts/site_search.py "how do I resume a run"    # the first hits
    python scripts/site_search.py --index FILE               # by search/search_index.json of a built site

The ranking is that of Material for MkDocs 9, which runs lunr 2.3 in the browser: one document per section; each word of
the query is a prefix; BM25 without lengths; a title counts 1,000 times its text; pages, and documents with more of the
words, get a bonus; one hit per page. Without an index the documents are the sections of the Markdown files.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import polyfed
from reference import pages

ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT / "tests" / "house" / "questions.yaml"
OF_THE_PROJECT = (
    *("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md"),
    *(file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "papers").rglob("*.md"))),
)
"""Pages outside the folder of pages."""
BOOSTS = {"papers/": 0.1, "CHANGELOG": 0.1, "decisions": 0.1, "CO": 0.3, "reference/": 0.3}
"""Start of a page's path -> factor of its hits: guides come before lists and records."""
_FIELDS = {"title": 1000.0, "text": 1.0}
_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """a all also an and any are as at be by can do does for from has have how i if in into is it its my no not of
        on only or other our own than that the their them these they this to us was we were what when where which while
        who why will with you your""",
    )
)
"""Words that lunr's index leaves out, as far as pages have them."""
_HEADING = re.compile(r"(#{1,6}) +(.+)")
_MARKUP = re.compile(r"\]\([^)]*\)|<!--.*?-->|</?\w[^>]*>|[`*|\[\]]|!(?=\[)", re.DOTALL)


def texts() -> dict[str, str]:
    """Path of each page in the site -> its Markdown, which begins with its heading."""
    made = {"index.md": _from_root("README.md"), **{name: _from_root(name) for name in OF_THE_PROJECT}}
    written = {
        path.relative_to(ROOT / "docs").as_posix(): path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md")
    }
    return written | made | {f"reference/{name}": text for name, text in pages().items()}


def _from_root(name: str) -> str:
    """Page without the comment before its heading, which would leave it without a title."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(r"\A<!--.*?-->\s*", "", text)


def boost(page: str) -> float:
    """Factor of a page's hits."""
    return next((factor for start, factor in BOOSTS.items() if page.startswith(start)), 1.0)


def documents(site: Mapping[str, str]) -> list[dict[str, Any]]:
    """Sections of pages, in the form of the search index: location, title, text, boost."""
    return [
        {"location": f"{page}{anchor}", "title": title, "text": text, "boost": boost(page)}
        for page, markdown in site.items()
        for anchor, title, text in _sections(_with_api(markdown))
    ]


def _with_api(markdown: str) -> str:
    """Page on which names of the API are headings, as mkdocstrings makes them."""

    def named(match: re.Match[str]) -> str:
        module, _, name = match[1].rpartition(".")
        owner = sys.modules[module] if name in vars(sys.modules.get(module, polyfed)) else polyfed
        own = vars(getattr(owner, name, polyfed))
        members = [own[key] for key in own if key[0] != "_" and inspect.isfunction(own[key])]
        parts = [f"### {each.__name__}\n{inspect.getdoc(each) or ''}" for each in members]
        return "\n".join([f"## {name}\n{inspect.getdoc(getattr(owner, name, None)) or ''}", *parts])

    return re.sub(r"^::: (\S+)(?:\n    .*)*", named, markdown, flags=re.MULTILINE)


def _sections(markdown: str) -> Iterator[tuple[str, str, str]]:
    """Anchor, heading and text of each section."""
    anchor, title, lines, fenced = "", "", list[str](), False
    known: Counter[str] = Counter()
    for line in markdown.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if (heading := _HEADING.fullmatch(line)) is None or fenced:
            lines.append(line)
            continue
        if title:
            yield anchor, title, _MARKUP.sub(" ", "\n".join(lines))
        title, lines = _MARKUP.sub("", heading[2]), []
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
        anchor = "" if len(heading[1]) == 1 else f"#{slug}" + (f"_{known[slug]}" if known[slug] else "")
        known[slug] += 1
    yield anchor, title, _MARKUP.sub(" ", "\n".join(lines))


class Search:
    """An index of documents, separated into words as ``mkdocs.yml`` sets it."""

    def __init__(self, docs: Sequence[Mapping[str, Any]]) -> None:
        self.docs = docs
        config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
        self.separator = re.compile(re.search(r"search: \{separator: '(.+)'\}", config)[1])  # type: ignore[index]
        self.counts = {field: [Counter(self._words(doc[field])) for doc in docs] for field in _FIELDS}
        holders = Counter(word for own in self.counts.values() for counts in own for word in counts)
        self.idf = {w: math.log(1 + abs((len(docs) - n + 0.5) / (n + 0.5))) for w, n in holders.items()}

    def _words(self, text: str) -> list[str]:
        return [word for word in self._split(re.sub(r"<[^>]*>", " ", text)) if word not in _FUNCTION_WORDS]

    def _split(self, text: str) -> list[str]:
        return [word for word in self.separator.split(text.lower()) if word]

    def pages(self, query: str) -> list[str]:
        """Pages that a query finds, the best first."""
        typed = self._split(query)
        wanted = Counter(word for start in typed for word in self.idf if word.startswith(start))
        scores = [self._score(place, typed, wanted) for place in range(len(self.docs))]
        order = sorted((place for place, score in enumerate(scores) if score), key=lambda place: -scores[place])
        return list(dict.fromkeys(self.docs[place]["location"].partition("#")[0] for place in order))

    def _score(self, place: int, typed: Iterable[str], wanted: Mapping[str, int]) -> float:
        doc, total, words = self.docs[place], 0.0, set[str]()
        for field, factor in _FIELDS.items():
            own = {word: tf for word, tf in self.counts[field][place].items() if word in wanted}
            words |= own.keys()
            bm25 = sum(wanted[word] * self.idf[word] * 2.2 * tf / (1.2 + tf) for word, tf in own.items())
            total += factor * doc.get("boost", 1) * bm25
        of = {start: any(w.startswith(start) for w in words) for start in typed}
        counted = [occurs for start, occurs in of.items() if occurs or start not in _FUNCTION_WORDS]
        share = sum(counted) / len(counted) if counted else 0
        return total * (1 + (("#" not in doc["location"]) + share) ** 2)


def questions() -> dict[str, str]:
    """Question -> page, and section, that answers it."""
    content: dict[str, str] = yaml.safe_load(QUESTIONS.read_text(encoding="utf-8"))
    return content


def hits(docs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Question -> rank of its page among the hits, from 1; 0 if it is not a hit or lacks the section."""
    search, ranks = Search(docs), dict[str, int]()
    known = {doc["location"].replace(".html", ".md") for doc in docs}
    for question, answer in questions().items():
        shown = [page.replace(".html", ".md") for page in search.pages(question)]
        page = answer.partition("#")[0]
        ranks[question] = shown.index(page) + 1 if page in shown and answer in known else 0
    return ranks


def main() -> int:
    """Print ranks, or the hits of a query."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("query", nargs="?")
    parser.add_argument("--index", type=Path, help="search_index.json of a built site")
    options = parser.parse_args()
    docs = json.loads(options.index.read_text())["docs"] if options.index else documents(texts())
    if options.query:
        print(*Search(docs).pages(options.query)[:6], sep="\n")
        return 0
    ranks = hits(docs)
    for question, place in ranks.items():
        print(f"{place or '-':>3}  {question}  ->  {questions()[question]}")
    return int(any(not 1 <= place <= 3 for place in ranks.values()))


if __name__ == "__main__":
    sys.exit(main())
