"""Opening a run folder of another person sends nothing to a hub."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed import Experiment, export_model, load_model, open_run
from polyfed.core.errors import ConfigError
from tiny_networks import save


@pytest.mark.slow
def test_a_folder_that_is_opened_asks_no_hub_for_what_it_names(
    tiny: Any, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("vit", tmp_path / "weights" / "owner")
    save("bert", tmp_path / "weights" / "owner")
    words = {"name": "tokens", "length": 8, "tokenizer": {"name": "pretrained", "path": "owner/bert"}}
    both = {
        "image": {"name": "hf", "weights": "owner/vit", "view": {"name": "pixels", "size": 32}},
        "text": {"name": "bag", "width": 8, "view": words},
    }
    tiny["server"]["model"]["encoders"] = tiny["clients"]["paired"]["model"]["encoders"] = both
    tiny["data"]["weights_dir"] = str(tmp_path / "weights")
    tiny["run"]["rounds"] = 1
    folder = polyfed.run(Experiment.parse(tiny), tmp_path / "run", quiet=True).folder
    assert open_run(folder).model.dim == 8
    asked: list[object] = []

    def refuse(*address: object, **_: object) -> None:
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "empty").mkdir()
    elsewhere = tmp_path / "empty"
    message = r"'owner/(vit|bert)' .*(nor|not) in the hub's cache here; for an opened folder .*--allow-code"
    for use in (
        lambda: open_run(folder, weights_dir=elsewhere).model,
        lambda: load_model(folder, "paired-0", weights_dir=elsewhere),
        lambda: open_run(folder, weights_dir=elsewhere).federation.infos,
        lambda: export_model(open_run(folder, weights_dir=elsewhere), tmp_path / "exported"),
    ):
        with pytest.raises(ConfigError, match=message):
            use()
    for words_ in (("evaluate", folder, "--data", "scenes"), ("gallery", folder), ("export", folder)):
        assert re.search(message, cli(*words_, "--weights-dir", elsewhere)[2])
    shutil.rmtree(tmp_path / "weights")
    shutil.rmtree(folder / "models")
    with pytest.raises(ConfigError, match=message):
        polyfed.resume(folder, quiet=True)
    assert not asked
    for allow in (True, False):
        assert open_run(folder, allow_code=allow).federation.data.context.hub is allow
