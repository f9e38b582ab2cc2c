"""Examples in docstrings run and print the shown output; every public loss has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch

import polyfed.losses

LOSSES = [module.name for module in pkgutil.iter_modules(polyfed.losses.__path__, "polyfed.losses.")]
PARTS = [
    *(f"polyfed.models.{name}" for name in ("blocks", "decoders", "fusion", "heads", "masked", "towers")),
    "polyfed.models.adapters.adapter",
    *(f"polyfed.tasks.{name}" for name in ("metrics", "vqa")),
    *(f"polyfed.aggregation.{name}" for name in ("distinct", "ensemble", "mean", "robust")),
    *(f"polyfed.aggregation.{name}" for name in ("statistics", "weighting", "averagings.low_rank")),
    *(f"polyfed.algorithms.{name}" for name in ("fedavg", "creamfl", "fedcola", "fedafd", "fedaid")),
    *(f"polyfed.algorithms.{name}" for name in ("baselines", "change_distillation", "fed_mae", "fedema", "hetlora")),
    *(f"polyfed.algorithms.{name}" for name in ("low_rank", "prompts")),
    "polyfed.optim.adamp",
]


def public(module: Any) -> dict[str, Any]:
    """Functions and classes that a module defines, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
        and value.__module__ == module.__name__
    }


@pytest.mark.parametrize("name", [*LOSSES, *PARTS])
def test_examples_print_the_shown_output(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(verbose=False)
    examples = [
        test
        for key, value in public(module).items()
        # `module=False`: a decorated function has another module's globals, and is an example all the same
        for test in doctest.DocTestFinder(recurse=False).find(
            value, key, module=False, globs=vars(module) | {"torch": torch}
        )  # type: ignore[arg-type]
        if test.examples
    ]
    assert examples, f"{name} has no example"
    for test in examples:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", LOSSES)
def test_every_public_loss_has_an_example(name: str) -> None:
    for key, value in public(importlib.import_module(name)).items():
        assert ">>>" in (value.__doc__ or ""), f"{name}.{key} has no example"
