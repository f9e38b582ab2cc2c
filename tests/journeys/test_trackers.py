"""A run with each tracker's real package, without paths: begun, killed, resumed, reported, exported and watched."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyfed.runs.records import RunRecords
from polyfed.runs.sink import Sink
from small_federations import tiny_experiment

pytestmark = pytest.mark.slow
CLI = "import sys; from polyfed.cli.main import main; sys.exit(main())"
MARK = "Klinik_Secret"


def polyfed(*arguments: object, wait: bool = True) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CLI, *map(str, arguments)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True, **pipes)
    if wait:
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, (arguments, output)
        assert "switched off" not in output
    return process


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_run_that_a_tracker_follows_goes_its_whole_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in Sink.model_validate(name).packages:
        pytest.importorskip(package)
    for key in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(key, str(tmp_path / "home" / key))
    monkeypatch.chdir(tmp_path)
    data = tmp_path / MARK
    data.mkdir()
    config = tiny_experiment()
    config["data"]["dir"] = str(data)
    config["data"]["sources"]["unused"] = {"name": "parquet", "path": str(data), "columns": {"text": "text"}}
    config["run"] |= {"rounds": 60, "threads": 1, "output": {"sinks": [name]}, "eval_every": 20}
    Path("x.yaml").write_text(yaml.safe_dump(config))
    begun = polyfed("run", "x.yaml", "--out", "run", wait=False)
    deadline = time.monotonic() + 200
    while not list(Path("run").glob("checkpoints/round-00000[3-9].json")):
        assert begun.poll() is None, begun.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(begun.pid, signal.SIGKILL)
    begun.communicate()
    assert RunRecords.load(Path("run")).rounds < 60
    for words in (("resume", "run"), ("report", "run"), ("export", "run"), ("watch", "run")):
        polyfed(*words)
    assert RunRecords.load(Path("run")).rounds == 60
    kept = {path for path in Path("run").rglob("*") if name in str(path.relative_to("run")) and path.is_file()}
    assert kept
    assert not [path for path in kept if not path.is_symlink() and MARK.encode() in path.read_bytes()]
    assert importlib.import_module(name)
