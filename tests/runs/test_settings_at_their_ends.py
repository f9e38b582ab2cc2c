"""Every accepted setting does something: at the ends of its range a run trains and ends well, or is refused by name."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from safetensors.torch import load_file

import polyfed
from polyfed.core.errors import PolyfedError
from polyfed.core.settings import Settings
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from small_federations import METHODS, Config, federation_for

BEYOND = {"batch_size": 10_000}
"""Accepted values far beyond what there is."""
UNMOVED = {"local"}
"""Methods that train no server model."""
LARGE = 40
"""Whole numbers beyond it are counts whose cost grows with them; the other end is tried."""
Path_ = tuple[str, ...]
End = tuple[type, str, int | float]


def ends_of(field: FieldInfo) -> Iterator[int | float]:
    """Smallest and largest value that a field's bounds allow; of open ends one close by."""
    complete = field.annotation is int or "int" in str(field.annotation).replace("Interval", "")
    step: float = 1 if complete and "float" not in str(field.annotation) else 1e-6
    for bound in field.metadata:
        match bound:
            case Ge(ge=low):
                yield low  # type: ignore[misc]
            case Gt(gt=low):
                yield low + step  # type: ignore[misc, operator]
            case Le(le=high) if step < 1 or high <= LARGE:  # type: ignore[operator]
                yield high  # type: ignore[misc]
            case Lt(lt=high) if step < 1 or high <= LARGE:  # type: ignore[operator]
                yield high - step  # type: ignore[misc, operator]


def bounded(part: Any, path: Path_ = ()) -> Iterator[tuple[End, Path_]]:
    """All bounded settings in a tree with the ends of their ranges, and where they are."""
    if isinstance(part, Settings):
        for name, field in type(part).model_fields.items():
            declaring = next(base for base in type(part).__mro__ if name in inspect.get_annotations(base))
            for end in (*ends_of(field), *([BEYOND[name]] if name in BEYOND else [])):
                yield (declaring, name, end), (*path, name)
            yield from bounded(getattr(part, name), (*path, name))
    elif isinstance(part, Mapping):
        for name, inner in part.items():
            yield from bounded(inner, (*path, str(name)))


def config_of(method: str) -> Config:
    config = federation_for(method)
    config["run"] |= {"rounds": 2, "output": {"plots": False, "keep_rounds": [0]}}
    return config


def changed(content: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(content)
    section = result
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    return result


def cases() -> Iterator[Any]:
    """Each setting in the first experiment that has it; that every method heeds its own is tested with methods."""
    seen: dict[End, tuple[str, Path_]] = {}
    for method in ("creamfl", *METHODS):
        for end, path in bounded(Experiment.parse(config_of(method))):
            seen.setdefault(end, (method, path))
    for (_, _, end), (method, path) in seen.items():
        yield pytest.param(method, path, end, id=f"{method}-{'.'.join(path)}-{end:g}")


DIVERGING = ("lr", "server_lr", "proto_weight")
"""At 100 and more they may end in NaN, which the run reports."""
NAMED_OTHERWISE: dict[str, list[str]] = {
    **{key: ["server.model must equal the model of one type"] for key in ("size", "length", "rank")},
    "tensor_norm": ["the limit is 1e-06"],
    "row_norm": ["the limit is 1e-06"],
    **{key: ["usable reply", "NaN"] for key in (*DIVERGING, "regularisation", "contrast", "tau")},
    "seed": ["the public set shares 8 items"],  # sources with one seed have the same items
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "end"), list(cases()))
def test_it_trains_or_is_refused_by_name(method: str, path: Path_, end: float, tmp_path: Path) -> None:
    content = changed(Experiment.parse(config_of(method)).model_dump(mode="json"), path, end)
    try:
        run = polyfed.run(Experiment.load(content), tmp_path / "run", quiet=True)
    except PolyfedError as error:
        reason = str(error)
    else:
        require_trained(method, path, run)
        return
    assert any(part in reason for part in (*path[-2:], *NAMED_OTHERWISE.get(path[-1], ())))


def require_trained(method: str, path: Path_, run: Run) -> None:
    values = [value for record in run.records.measurements for value in record.metrics.values()]
    assert values
    assert path[-1] in DIVERGING or not any(math.isnan(value) for value in values)
    only_evaluates = method == "server_only" and not run.experiment.algorithm.server_passes
    is_still = method in UNMOVED or path[-1] in DIVERGING or only_evaluates
    if (run.folder / "models").exists() and not is_still:
        before, after = (load_file(run.folder / f"models/{when}/model.safetensors") for when in ("round-0", "last"))
        assert any(not value.equal(before[name]) for name, value in after.items())
