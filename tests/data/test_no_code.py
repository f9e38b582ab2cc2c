"""Folders of pretrained networks and tokenizers are data: nothing in them is run, and nobody is asked whether to."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import polyfed
from polyfed.core.errors import ConfigError
from polyfed.data.backbones import NO_CODE, TextPreparation, frozen_backbone, outline
from polyfed.data.tokenizers import PretrainedTokenizer
from polyfed.data.view import DataContext

SOURCES = Path(polyfed.__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network and a tokenizer that bring code; whoever is asked says yes."""
    made = tmp_path / "weights" / "evil"
    made.mkdir(parents=True)
    entries = {"AutoConfig": "code.C", "AutoModel": "code.M", "AutoTokenizer": ["code.T", None]}
    (made / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": entries}))
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": entries}))
    (made / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass C: pass\nC = M = T = C\n")
    monkeypatch.setattr("builtins.input", lambda *_: (tmp_path / "asked").touch() or "y")
    return made


def test_code_in_a_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    context = DataContext(tmp_path / "cache", tmp_path / "weights")
    with pytest.raises(ConfigError):
        outline(folder, "auto")
    with pytest.raises(ConfigError):
        frozen_backbone(folder, "auto")
    with pytest.raises(ConfigError):
        TextPreparation.of(folder, 8, pad_to_length=False)
    with pytest.raises(ConfigError):
        PretrainedTokenizer(path="evil").load("text", context)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "asked").exists()


def calls() -> list[tuple[str, ast.Call]]:
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)) if re.search(r"\.from_(pretrained|config)\(", source) else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("from_pretrained", "from_config"):
                found.append((f"{path.relative_to(SOURCES)}:{node.lineno}", node))
    return found


def test_every_call_says_so() -> None:
    assert NO_CODE == {"trust_remote_code": False}
    silent = [
        place
        for place, call in calls()
        if not {"NO_CODE", "always"} & {ast.unparse(word.value) for word in call.keywords if word.arg is None}
    ]
    assert calls()
    assert silent == []
