from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import write_run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")
