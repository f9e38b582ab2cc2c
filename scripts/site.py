"""Hooks of mkdocs: pages that are made from the code, and links out of the folder of pages."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from notebooks import NAMES, notebook
from site_search import boost, texts

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page, which is the README, the project's own pages, the reference, and tutorials as notebooks."""
    from mkdocs.structure.files import File

    made = {name: text for name, text in texts().items() if files.get_file_from_path(name) is None}
    made |= {f"tutorials/{name}.ipynb": notebook(name) for name in NAMES}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for picture in (ROOT / "papers").rglob("*.svg"):
        files.append(File.generated(config, picture.relative_to(ROOT).as_posix(), abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Page whose links to files without a page, such as code, are names; dead links stay for mkdocs to report."""
    page.meta.setdefault("search", {"boost": boost(page.file.src_uri)})
    folder, name = posixpath.split(page.file.src_uri.removesuffix(".md"))
    if folder == "tutorials" and name in NAMES:
        title, _, text = markdown.partition("\n")
        markdown = f"{title}\n\n[This page as a notebook]({name}.ipynb)\n{text}"

    def changed(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        of_root = target.removeprefix("../")
        if files.get_file_from_path(target) or not (ROOT / of_root).is_file():
            return link[0]
        if files.get_file_from_path(inside := of_root.removeprefix("docs/")):
            return f"[{link[1]}]({posixpath.relpath(inside, folder)}{link[3] or ''})"
        return f"{link[1]} (`{of_root}`)"

    return _LINK.sub(changed, markdown)
