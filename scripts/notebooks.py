"""Tutorials as notebooks: text and code blocks of a page become cells, so that the page is their only source.

    python scripts/notebooks.py FOLDER      # writes them

A block of Python below ``<!-- file: NAME -->`` is written into that file; a block of bash runs in a shell.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

TUTORIALS = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
NAMES = ("ten-minutes", "own-data", "own-method", "reading-a-report")
"""Not three-sites, which needs a terminal for each site."""

_BLOCK = re.compile(r"(?:<!-- file: ([\w.-]+) -->\n)?^```(python|bash)\n(.*?)^```\n", re.M | re.S)
_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)")


def cells(page: str) -> Iterator[tuple[str, str]]:
    """Type (markdown or code) and source of each cell; links that lead out of a notebook become their text."""
    end = 0
    for block in _BLOCK.finditer(page):
        yield "markdown", _LINK.sub(r"\1", page[end : block.start()]).strip()
        file, language, code = block.groups()
        magic = "%%bash\n" if language == "bash" else f"%%writefile {file}\n" if file else ""
        yield "code", magic + code.rstrip()
        end = block.end()
    yield "markdown", _LINK.sub(r"\1", page[end:]).strip()


def notebook(name: str) -> str:
    """A tutorial as the text of an .ipynb file."""
    import nbformat
    from nbformat import v4

    page = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    made = [
        getattr(v4, f"new_{type_of}_cell")(source, id=f"{name}-{place}")  # ids that do not change from build to build
        for place, (type_of, source) in enumerate(cells(page))
        if source
    ]
    return str(nbformat.writes(v4.new_notebook(cells=made)))


if __name__ == "__main__":
    for tutorial in NAMES:
        Path(sys.argv[1], f"{tutorial}.ipynb").write_text(notebook(tutorial), encoding="utf-8")
