"""Functions, lines and files of polyfed that a run of a method enters, by tracing one on a tiny federation."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType

METHODS = ("fedavg", "creamfl", "fedcola", "fedafd", "fedaid")


def entered(method: str) -> set[CodeType]:
    """Code of polyfed's functions that training, evaluating and recording a method enters, in this process."""
    from polyfed import Experiment, run
    from small_federations import federation_for

    package = str(Path("src/polyfed").resolve())
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            codes.add(frame.f_code)

    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(profile)
        try:
            run(Experiment.load(federation_for(method)), Path(folder) / "run", quiet=True)
        finally:
            sys.setprofile(None)
    return {code for code in codes if not code.co_name.startswith("<")}


def lines(code: CodeType) -> int:
    """Lines of a function that run, without those of functions within it."""
    return len({line for *_, line in code.co_lines() if line})


def show() -> None:
    """Print a line for each method, and one for all."""
    runs = {method: entered(method) for method in METHODS}
    runs["all of them"] = set().union(*runs.values())
    for method, codes in runs.items():
        files = {code.co_filename for code in codes}
        size = f"{len(codes):,} functions of {sum(map(lines, codes)):,} lines in {len(files)} files"
        print(f"a run of {method} enters {size}")
