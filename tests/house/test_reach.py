"""Files that one needs to understand a function, and frames of a step, as ``make house`` counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frames import frames_to_backward
from imports import modules
from reach import Package, Reach

SOURCES = {
    "method": """
from some.base import Base
from some.means import Mean, Median, Rule
from some.roles import Cohort
from some.unused import nothing
from some.far import Far

Any = TypeVar("Any", bound=Far)

class Method(Base):
    rule: Rule = Mean()
    rules: list[Median]

    def train(self, client):
        return helper(client)

def helper(client):
    import some.far as far
    return far.LIMIT + measured(client)

def measured(client: Any):
    return client.length
""",
    "base": """
from some.roles import Cohort
from some.wire import send

class Base:
    def round(self, cohort: Cohort):
        for reply in cohort.ask(self.train):
            send(self.rule.fold(reply))
            [rule.fold(reply) for rule in self.rules]
    def train(self, client): ...
    def other(self): nothing()
""",
    "means": """
class Rule:
    def fold(self, reply): ...
class Mean(Rule):
    def fold(self, reply): return deep(reply)
class Median(Rule):
    def fold(self, reply): return self
from some.deep import deep
""",
    "deep": """
def deep(reply): return Made(reply).size
class Made:
    def __init__(self, size): self.size = self.size or size
""",
    "far": "LIMIT = 3\nclass Far:\n    @property\n    def length(self): ...",
    "roles": "from some.engine import go\nclass Cohort:\n    def ask(self, step): return go(step)",
    "engine": "def go(step): ...",
    "wire": "def send(reply): ...",
    "unused": "def nothing(): ...",
}


def test_files_of_what_the_reached_bodies_use_count(tmp_path: Path) -> None:
    root = tmp_path / "some"
    root.mkdir()
    for name, code in SOURCES.items():
        (root / f"{name}.py").write_text(code)
    reach = Reach(Package(modules(root)), apart=("wire",), edge=("roles",))
    reach.start("method.py:Method.round")
    assert {path.stem: names for path, names in reach.functions.items()} == {
        "method": {"train", "helper", "measured"},
        "base": {"round"},
        "means": {"fold"},
        "deep": {"deep", "__init__"},
        "far": {"length"},
        "roles": {"ask"},
    }


def test_the_way_to_backward_begins_at_the_round(tiny: dict[str, Any]) -> None:
    way = frames_to_backward(tiny)
    assert way[0] == "polyfed.algorithms.fedavg.FedAvg.round"
    assert way[-1] == "polyfed.federation.trainer.Trainer.step"


def test_a_start_that_is_not_there_is_named(tmp_path: Path) -> None:
    root = tmp_path / "some"
    root.mkdir()
    (root / "method.py").write_text(SOURCES["method"])
    with pytest.raises(SystemExit, match=r"method\.py has no function 'Method\.ask'"):
        Reach(Package(modules(root))).start("method.py:Method.ask")
