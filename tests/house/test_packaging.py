"""Metadata for an index: extras that exist, links that lead somewhere."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import polyfed

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRA = re.compile(
    r"""(?:polyfed\[|brought_by\("|how_to_install\("|pip_extra[^=\n]* = "|^EXTRA = ")([\w,]+)[\]"]""", re.M
)


def test_each_extra_that_code_or_a_page_names_exists() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {name for file in files for names in EXTRA.findall(file.read_text()) for name in names.split(",")}
    assert {"adapters", "deploy", "privacy", "wandb"} <= named
    assert named <= PROJECT["project"]["optional-dependencies"].keys()


def test_a_release_has_no_relative_link_and_a_build_elsewhere_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(MetadataHookInterface=object)  # installed where wheels are built
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", fake)
    import index_page

    hook, release = index_page.IndexPage(), {"GITHUB_SERVER_URL": "https://host.org", "GITHUB_REPOSITORY": "me/polyfed"}
    hook.root, metadata = str(ROOT), {"version": polyfed.__version__}
    for key, value in release.items():
        monkeypatch.setenv(key, value)
    hook.update(metadata)
    links = re.findall(r"\]\(([^)]+)\)", metadata["readme"]["text"])
    at = f"https://host.org/me/polyfed/{{}}/v{polyfed.__version__}/docs/"
    assert all(link.startswith("https://") for link in links)
    assert at.format("blob") + "how-to/which-method.md" in links
    assert (
        index_page.with_whole_links("![a](docs/a.svg)", "https://host.org", "v1")
        == "![a](https://host.org/raw/v1/docs/a.svg)"
    )
    assert metadata["urls"]["Source"] == "https://host.org/me/polyfed"
    monkeypatch.delenv("GITHUB_REPOSITORY")
    hook.update(metadata)
    assert metadata == metadata | {"urls": {}}
    assert metadata["readme"]["text"] == (ROOT / "README.md").read_text()
