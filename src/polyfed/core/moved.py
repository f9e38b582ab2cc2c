"""Keys that stand elsewhere by now: a configuration may have the old ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

MOVED: Mapping[str, str] = {
    **dict.fromkeys(("deadline", "limits", "min_clients", "phases", "transport"), "exchange"),
    **dict.fromkeys(("keep_client_models", "keep_rounds", "plots", "sinks"), "output"),
}
"""Key that stood in ``run`` until 0.3 -> section of ``run`` in which it stands now."""

GONE: Mapping[str, Mapping[str, Any]] = {
    "adapter": {"dora": False, "dropout": 0.0},
    "algorithm": {
        "first_private": None,
        "first_public": None,
        "mean": "uniform",
        "share_head": True,
        "variate": "path",
        "weighting": "uniform",
    },
    "attackers": {"knows": "all"},
    "augment": {"jitter": None},
    "clients": {"awake": 1.0, "period": 24.0},
    "contrast": {"adapter_outputs": 10, "tau_inter": 0.5, "tau_intra": 0.5},
    "engine": {"node_port": 0, "object_store": None},
    "guidance": {"anchor_mode": "training", "temperature": 0.07},
    "missing": {"by": "item", "concentration": None},
    "optimizer": {"nesterov": False},
    "pace": {"replay": None},
    "partition": {"attempts": 1000, "size_cap": True},
    "public": {"form": "representations", "largest_score": None},
    "reply": {"prototypes": None},
    "rotate": {"resampling": "nearest"},
    "robust": {"kept": None, "smoothing": 1e-6},
    "secure": {"beyond": "refuse"},
    "task": {"cross_entropy_weight": 1.0, "dice_weight": 1.0},
    "teacher": {
        "aligner": "averaged",
        "broadcast": "shared",
        "judge_clients": False,
        "measure": "task",
        "measure_share": 1.0,
        "measured_on": "aggregated",
    },
    "transport": {"topk": None, "unchanged": "send"},
    "twin": {"candidates": 9, "passes": None, "rate": None, "tuned": None},
}
"""Section and key of older run folders that are gone -> value at which it changed nothing."""


def moved_path(path: str) -> str:
    """The present path of a setting: ``run.output.plots`` for ``run.plots``, with a warning."""
    first, _, key = path.partition(".")
    section = MOVED.get(key.partition(".")[0]) if first == "run" else None
    if section is None:
        return path
    _tell(key.partition(".")[0])
    return f"run.{section}.{key}"


def with_moved(content: Mapping[str, Any], *, warns: bool = True) -> dict[str, Any]:
    """A configuration with its keys in their present sections; with a warning if ``warns``.

    Keys that are gone are left out where they changed nothing; any other value of them stays, and is refused.
    """
    known: dict[str, Any] = without_gone(content)
    run = known.get("run")
    if not isinstance(run, Mapping) or MOVED.keys().isdisjoint(run):
        return known
    now = {key: value for key, value in run.items() if key not in MOVED}
    for key in (key for key in run if key in MOVED):  # in the order of the file: equal runs have equal pages
        now[MOVED[key]] = {key: run[key], **now.get(MOVED[key], {})}
        if warns:
            _tell(key)
    return {**known, "run": now}


def without_gone(content: Any, section: str = "") -> Any:
    """Settings without keys that are gone, where these changed nothing; any other value stays, and is refused."""
    if isinstance(content, list):
        return [without_gone(entry, section) for entry in content]
    if not isinstance(content, Mapping):
        return content
    # another's component may have a key of that name
    gone = {} if "." in str(content.get("name")) else GONE.get(section, {})
    if section == "twin" and content.get("of"):  # twins of runs until 0.4 name their search, which is over
        return {key: value for key, value in content.items() if key not in ("candidates", "tuned")}
    return {key: without_gone(value, key) for key, value in content.items() if gone.get(key, ...) != value}


@cache  # once per process, however many experiments a study has
def _tell(key: str) -> None:
    log.warning("run.%s is run.%s.%s now; the old name is still read", key, MOVED[key], key)
