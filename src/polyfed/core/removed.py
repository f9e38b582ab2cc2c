"""What polyfed no longer has: a configuration that names it is told, in one line, which version does."""

from __future__ import annotations

from collections.abc import Mapping

REMOVED: Mapping[str, frozenset[str]] = {
    "Asynchronous": frozenset({"replay"}),
    "Buffered": frozenset({"replay"}),
    "Connection": frozenset({"node_port"}),
    "Drawing": frozenset({"points"}),
    "Drawn": frozenset({"awake", "period"}),
    "FewShot": frozenset({"fit", "standardise"}),
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
    "adapter": frozenset({"prompt_generator"}),
    "algorithm": frozenset({"feddat", "feddpa", "fedproto", "fedtgp", "fedtpg", "mmic", "pfedprompt", "rcsr"}),
    "analysis": frozenset({"across", "traffic"}),
    "command": frozenset({"serve", "analyse across", "analyse gap", "analyse traffic"}),
    "encoder": frozenset({"transformer"}),
    "imputation": frozenset({"aggregator", "generator", "reconstruction"}),
    "pace": frozenset({"deadline"}),
    "partition": frozenset({"by_label"}),
    "probe": frozenset({"out_of_domain"}),
    "robustrule": frozenset({"agreement"}),
    "serveroptimizer": frozenset({"yogi"}),
    "source": frozenset({"blank"}),
    "staleness": frozenset({"hinge"}),
    "study": frozenset({"adapters-personal"}),
    "times": frozenset({"trace"}),
}
"""Family as errors call it ("algorithm"), "preset", "study", "command", or class of settings -> names and keys."""


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
        *(
            "missing",
            "modalities",
            "pace",
            "privacy",
            "regime-change",
            "robust",
            "robust-texts",
            "vqa-daquar",
            "vqa-easy",
        ),
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
