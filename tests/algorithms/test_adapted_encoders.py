"""Methods over public data on pretrained encoders with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grids import mostly_slow
from polyfed import Experiment, open_run, run
from small_federations import adapted

pytest.importorskip("peft", reason="peft is not installed")

METHODS: dict[str, Any] = {"creamfl": {}, "fedafd": {}, "change_distillation": {"warmup_rounds": 0}, "fedmd": {}}


@pytest.mark.parametrize("method", mostly_slow(METHODS, "creamfl"))
def test_adapters_learn_and_networks_stay(method: str, tmp_path: Path) -> None:
    config = adapted(name=method, **METHODS[method]) | {"public": {"source": "scenes", "items": 6}}
    run(Experiment.load(config), tmp_path / "run", quiet=True)
    after = open_run(tmp_path / "run").server_model("last").model.exchanged()
    learnt = [value for name, value in after.items() if ".lora_B." in name]  # zero at first
    assert learnt
    assert all(value.abs().max() > 0 for value in learnt)
    assert all(".lora_" in name or ".trunk." not in name for name in after)
