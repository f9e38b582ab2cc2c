"""What polyfed no longer has, or has under another name: a configuration that names it is told so in one line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

REMOVED: Mapping[str, frozenset[str]] = {
    "Asynchronous": frozenset({"replay"}),
    "Buffered": frozenset({"replay"}),
    "Centres": frozenset({"by"}),
    "Connection": frozenset({"node_port"}),
    "Drawing": frozenset({"points"}),
    "Drawn": frozenset({"awake", "period"}),
    "FewShot": frozenset({"features", "fit", "standardise"}),
    "Leakage": frozenset({"attacks", "canaries"}),
    "LittleIsEnough": frozenset({"knows"}),
    "LoRA": frozenset({"dora"}),
    "MFCPL": frozenset({"weighting"}),
    "MissingSettings": frozenset({"by", "concentration"}),
    "Ray": frozenset({"object_store"}),
    "Scaffold": frozenset({"variate"}),
    "Study": frozenset({"more_seeds"}),
    "Teacher": frozenset({"judge_clients"}),
    "Transport": frozenset({"topk", "unchanged"}),
    "TwinSettings": frozenset({"passes", "rate"}),
    "Weights": frozenset({"at"}),
    "adapter": frozenset({"prompt_generator"}),
    "algorithm": frozenset({"feddat", "feddpa", "fedproto", "fedtgp", "fedtpg", "mmic", "pfedprompt", "rcsr"}),
    "analysis": frozenset({"across", "gap", "traffic"}),
    "command": frozenset({"serve", "study report"}),
    "encoder": frozenset({"transformer"}),
    "imputation": frozenset({"aggregator", "generator", "reconstruction"}),
    "pace": frozenset({"deadline"}),
    "partition": frozenset({"by_label"}),
    "probe": frozenset({"out_of_domain", "zero_shot"}),
    "robustrule": frozenset({"agreement"}),
    "serveroptimizer": frozenset({"yogi"}),
    "source": frozenset({"blank"}),
    "staleness": frozenset({"hinge"}),
    "study": frozenset({"adapters-personal"}),
    "times": frozenset({"trace"}),
}
"""Family as errors call it ("algorithm"), "study", "command", or class of settings -> names and keys."""


def removed(family: str, name: str) -> str:
    """The line about a name that is gone; empty if there never was one."""
    if name not in REMOVED.get(family, ()):
        return ""
    return f"'{name}' was removed in 0.4; version 0.3 has it (pip install 'polyfed<0.4')"


STUDIES: Mapping[str, tuple[str, ...]] = {
    "creamfl": ("regime-creamfl", "creamfl-teaching"),
    "fedafd": ("parts-fedafd", "regime-fedafd"),
    "fedaid": ("parts-fedaid", "regime-fedaid"),
    "fedcola": ("fedcola-compensation", "regime-fedcola"),
    "polyfed": (
        *("adapters", "adapters-averaging", "adapters-privacy", "adapters-prompts", "adapters-ranks", "combinations"),
        *("demo", "knowledge", "leaderboard-ample", "leaderboard-medical", "leaderboard-scarce", "leaderboard-weights"),
        *("missing", "modalities", "pace", "privacy", "regime-change", "robust", "robust-texts"),
        *("vqa-daquar", "vqa-easy"),
    ),
}
"""Folder below papers/ -> studies that version 0.3 had by name; there were also papers/PAPER-ITEM."""


def removed_study(name: str) -> str:
    """The line about a study that had a name and is a file now, or is gone; empty if there never was one."""
    paper, _, item = name.removeprefix("papers/").partition("-")
    if not name.startswith("papers/") or not item or paper not in STUDIES:
        paper = next((folder for folder, names in STUDIES.items() if name in names), "")
        item = name.replace(f"-{paper}", "").replace(f"{paper}-", "")
    if paper:
        return f"since 0.4 it is papers/{paper}/{item}.yaml in polyfed's repository"
    return removed("study", name)


MOVED: Mapping[str, str] = {
    **dict.fromkeys(("deadline", "limits", "min_clients", "phases", "transport"), "exchange"),
    **dict.fromkeys(("keep_client_models", "keep_rounds", "plots", "sinks"), "output"),
}
"""Key that stood in ``run`` until 0.3 -> section of ``run`` in which it stands now."""


def moved_path(path: str) -> str:
    """The path of a setting as it is now: of ``run.plots`` it is ``run.output.plots``; a warning says so."""
    first, _, key = path.partition(".")
    section = MOVED.get(key.partition(".")[0]) if first == "run" else None
    if section is None:
        return path
    _tell(key.partition(".")[0])
    return f"run.{section}.{key}"


def with_moved(content: Mapping[str, Any], *, is_told: bool = True) -> dict[str, Any]:
    """A configuration with its keys in the sections where they stand now; a warning says so if ``is_told``."""
    run = content.get("run")
    if not isinstance(run, Mapping) or MOVED.keys().isdisjoint(run):
        return dict(content)
    now = {key: value for key, value in run.items() if key not in MOVED}
    for key in (key for key in run if key in MOVED):  # in the order of the file: equal runs have equal pages
        now[MOVED[key]] = {key: run[key], **now.get(MOVED[key], {})}
        if is_told:
            _tell(key)
    return {**content, "run": now}


@cache  # once a process, however many experiments a study has
def _tell(key: str) -> None:
    log.warning("run.%s is run.%s.%s now; the old name is still read", key, MOVED[key], key)
