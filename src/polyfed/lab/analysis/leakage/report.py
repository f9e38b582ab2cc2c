"""What a run gave away: all attacks, their tables and their picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from polyfed.core.device import cpu_threads
from polyfed.lab.analysis.leakage.canaries import canary_findings
from polyfed.lab.analysis.leakage.classes import class_findings
from polyfed.lab.analysis.leakage.figures import AttackResult, Found, NoAttack
from polyfed.lab.analysis.leakage.membership_attacks import membership_findings
from polyfed.lab.analysis.leakage.pictures import picture_findings
from polyfed.lab.analysis.leakage.seen import seen_round
from polyfed.lab.analysis.leakage.situation import ATTACKS, AttackPlan, Situation
from polyfed.lab.analysis.leakage.words import word_findings
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.lab.analysis.simulated import Simulated
from polyfed.reporting.figures import COLOURS, empty_figure, styled
from polyfed.reporting.saved_tables import table_json
from polyfed.reporting.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AUC = {"AUC": "{auc[value]:.2f} [{auc[low]:.2f}, {auc[high]:.2f}]"}
_TOLD = _AUC | {
    "told at 1 %": "{tpr_at_1_percent[value]:.2f} [{tpr_at_1_percent[low]:.2f}, {tpr_at_1_percent[high]:.2f}]"
}


class AttackKind(NamedTuple):
    """How it is done, and how its table is made of its figures: heading -> format."""

    findings: Callable[[Situation], Found]
    title: str
    columns: Mapping[str, str]
    note: str


_ATTACKS = {
    "membership": AttackKind(
        membership_findings,
        "was this sample trained on",
        _TOLD | {"members": "{members}", "others": "{others}"},
        "AUC: chance is 0.5. Told at 1 %: share of members that are told when at most 1 % of the others are taken for "
        "members. In brackets: intervals of 95 % (bootstrap; exact).",
    ),
    "words": AttackKind(
        word_findings,
        "words of the texts",
        _AUC
        | {"precision": "{precision:.2f}", "recall": "{recall:.2f}", "guess: precision": "{guessed_precision:.2f}"}
        | {"recall ": "{guessed_recall:.2f}", "words": "{private} of {vocabulary}"},
        "Precision and recall of recovered words; the guess takes as many, the most frequent of test texts.",
    ),
    "pictures": AttackKind(
        picture_findings,
        "pictures from the gradient of one batch",
        {"PSNR": "{psnr:.1f}", "lowest": "{lowest:.1f}", "highest": "{highest:.1f}", "guess": "{guess:.1f}"}
        | {"noise": "{noise:.1f}", "pictures": "{pictures}"},
        "dB, to the nearest reconstruction; guess: to the nearest of as many test pictures and their mean. The "
        "attacker gets one step's gradient and all of the batch but its pictures, which is more than crosses after "
        "several steps.",
    ),
    "canaries": AttackKind(
        canary_findings,
        "random labels of canaries",
        _AUC
        | {"exposure": "{exposure:.2f}", "without": "{without:.2f}", "highest": "{highest:.2f}"}
        | {"canaries": "{canaries}"},
        "Exposure: log2 of the number of classes over the label's rank; without: of the same labels where nobody was "
        "trained on them. AUC of one against the other: chance is 0.5.",
    ),
    "classes": AttackKind(
        class_findings,
        "classes that a client has more of",
        _TOLD | {"more than others": "{members}", "less": "{others}"},
        "AUC over clients and classes: chance is 0.5.",
    ),
}
Findings = Mapping[str, Sequence[AttackResult]]
"""Attack -> what it found."""


def run_leakage(opened: Simulated, plan: AttackPlan) -> AnalysisResult:
    """Attack what clients sent in the last round of a simulated run, and its models.

    Raises:
        ConfigError: the plan is impossible, or nobody has sent anything.
        RunError: the run's state before its last round is lost.
    """
    plan.require_range()
    findings: dict[str, list[AttackResult]] = {}
    unattacked: list[NoAttack] = []
    with cpu_threads(opened.experiment.run.threads), seen_round(opened) as seen:
        situation = Situation(opened, seen, plan)
        for name in ATTACKS:
            if name in plan.attacks:
                results = list(_ATTACKS[name].findings(situation))
                findings[name] = [one for one in results if isinstance(one, AttackResult)]
                unattacked += [one for one in results if isinstance(one, NoAttack)]
    run, protection = opened.run.name, protection_of(situation)
    facts = {"round": seen.number, "method": opened.experiment.algorithm.component_name(), "protection": protection}
    # whether the replies are those of the run to the bit
    facts |= {"exact": seen.is_exact, "plan": asdict(plan)}
    tables = _tables(run, facts, findings, unattacked)
    content = {
        "run": run,
        **facts,
        "findings": {name: _contents(found) for name, found in findings.items()},
        "no_attack": _contents(unattacked),
        "tables": [table_json(table) for table in tables],
    }
    return AnalysisResult(content, tables, partial(_draw, run, findings))


def _contents(found: Sequence[AttackResult | NoAttack]) -> list[Mapping[str, object]]:
    return [one.to_json() for one in found]


def _tables(run: str, facts: Mapping[str, Any], findings: Findings, unattacked: Sequence[NoAttack]) -> list[TextTable]:
    """A table for each kind of attack, and one of what was not attacked."""
    tables = []
    for name, attack in _ATTACKS.items():
        rows = [
            (one.on, one.attack, *(shown.format(**one.figures) for shown in attack.columns.values()), one.says)
            for one in findings.get(name, ())
        ]
        if rows:
            columns = ("attacked", "by", *attack.columns, "gave away")
            tables.append(TextTable(f"{run} gave away: {attack.title}", columns, rows, (attack.note,)))
    if unattacked:
        rows = [(one.on, one.attack, one.reason) for one in unattacked]
        tables.append(TextTable(f"{run}: no attack here", ("what", "attack", "because"), rows))
    exact = "to the bit" if facts["exact"] else "but for rounding: this machine computes other bits than the run's"
    about = (
        f"Method: {facts['method']}. Protection: {facts['protection']}. Replies of round {facts['round']}, asked "
        f"again, {exact}. An attack that finds nothing proves nothing: others may be better. One that is too weak "
        "where nothing protects is no measurement."
    )
    return [replace(table, notes=(*table.notes, about)) for table in tables[:1]] + tables[1:]


@styled
def _draw(run: str, findings: Findings) -> Figure:
    """AUC with its interval of every attack that has one, against chance."""
    every = [(name, one) for name, found in findings.items() for one in found]
    rows: list[tuple[str, AttackResult, Any]] = [
        (name, one, one.figures["auc"]) for name, one in every if "auc" in one.figures
    ]
    drawing = empty_figure(8.0, 1.4 + 0.3 * max(1, len(rows)), f"{run}: what it gave away")
    axes = drawing.subplots()
    for place, (name, _, auc) in enumerate(rows):
        colour = COLOURS[ATTACKS.index(name) % len(COLOURS)]
        axes.plot([auc["low"], auc["high"]], [place, place], color=colour)
        axes.plot([auc["value"]], [place], "o", color=colour)
    axes.axvline(0.5, linestyle="--", color="grey")
    axes.set_yticks(range(len(rows)), [f"{one.on}: {one.attack}" for _, one, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("AUC (chance: 0.5)")
    return drawing


def protection_of(situation: Situation) -> str:
    """What protects replies, in words."""
    privacy, parts = situation.privacy, list[str]()
    if privacy is not None and privacy.reply is not None:
        parts.append(f"noise on replies (multiplier {privacy.reply.noise_multiplier:.3g})")
    if privacy is not None and privacy.samples is not None:
        parts.append(f"DP-SGD (multiplier {privacy.samples.noise_multiplier:.3g})")
    if situation.is_masked:
        parts.append("secure aggregation")
    return " and ".join(parts) or "none"
