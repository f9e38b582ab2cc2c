"""Functions, lines and files of polyfed that a run enters, by tracing it on a tiny federation.

``traced.py`` prints one line per method; ``traced.py --least`` the machinery of the least run, by room.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

METHODS = ("fedavg", "creamfl", "fedcola", "fedafd", "fedaid")
PACKAGE = Path(__file__).parents[1] / "src" / "polyfed"
LEARNING = ("data", "losses", "models", "optim", "partitions", "reporting", "tasks")
"""Rooms outside the machinery: data, learning and reports."""


def least() -> dict[str, Any]:
    """FedAvg with two clients of one group; no server model, no public set."""
    from small_federations import experiment, group, plain, resnet, scenes

    image = {"columns": {"image": "image"}, "targets": {"label": "label"}}
    clients = {"image": group(2, "images", {"image": resnet()}, plain(0.05, 12), dim=8)}
    method = {"name": "fedavg", "local_epochs": 1}
    sources = {"images": scenes(24, 8, 8) | image}
    content: dict[str, Any] = experiment("least", sources, method, rounds=1, clients=clients)
    return content


def entered(content: dict[str, Any]) -> set[CodeType]:
    """Code of polyfed's functions that loading, training, evaluating and recording enter, in this process."""
    from polyfed import Experiment, run

    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            codes.add(frame.f_code)

    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(profile)
        try:
            run(Experiment.load(content), Path(folder) / "run", quiet=True)
        finally:
            sys.setprofile(None)
    return {code for code in codes if not code.co_name.startswith("<")}


def lines(code: CodeType) -> int:
    """Lines of a function that run, without those of functions within it."""
    return len({line for *_, line in code.co_lines() if line})


def machinery() -> dict[str, int]:
    """Room -> lines that the least run enters there, most first."""
    rooms = Counter[str]()
    for code in entered(least()):
        rooms[Path(code.co_filename).relative_to(PACKAGE).parts[0]] += lines(code)
    return {room: count for room, count in rooms.most_common() if room not in LEARNING}


def show() -> None:
    """Print one line per method, and one for all of them."""
    from small_federations import federation_for

    codes_of = {method: entered(federation_for(method)) for method in METHODS}
    codes_of["all of them"] = set().union(*codes_of.values())
    for method, codes in codes_of.items():
        files = {code.co_filename for code in codes}
        size = f"{len(codes):,} functions of {sum(map(lines, codes)):,} lines in {len(files)} files"
        print(f"a run of {method} enters {size}")


if __name__ == "__main__":
    sys.path.append(str(PACKAGE.parents[1] / "tests"))
    if "--least" in sys.argv:
        figures = machinery()
        print(sum(figures.values()), figures)
    else:
        show()
