"""Metadata of a release for package indexes: the README with absolute links, and the project's addresses.

The address of the repository is that of the workflow that builds (GITHUB_SERVER_URL, GITHUB_REPOSITORY); a build
elsewhere has none, and leaves the README as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)]+)\)")


class IndexPage(MetadataHookInterface):
    """Sets the fields ``readme`` and ``urls`` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling for each build."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = addresses(os.environ)
        if metadata["urls"]:
            text = with_whole_links(text, metadata["urls"]["Source"], f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def addresses(environment: Mapping[str, str]) -> dict[str, str]:
    """Name -> address, empty if the environment names no repository."""
    server, name = (environment.get(f"GITHUB_{key}", "") for key in ("SERVER_URL", "REPOSITORY"))
    if not (server and name):
        return {}
    source, (owner, _, project) = f"{server}/{name}", name.partition("/")
    return {
        "Documentation": f"https://{owner}.github.io/{project}/",
        "Source": source,
        "Issues": f"{source}/issues",
        "Changes": f"{source}/blob/main/CHANGELOG.md",
    }


def with_whole_links(readme: str, source: str, ref: str) -> str:
    """README whose links lead to pages, and to raw images, at one state of the repository."""

    def whole(link: re.Match[str]) -> str:
        view = "raw" if link[1] else "blob"
        return f"{link[1]}{link[2]}({source}/{view}/{ref}/{link[3]})"

    return _LINK.sub(whole, readme)
