"""What a run gave away: all attacks and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, nearest
from polyfed.lab.analysis.leakage.attacks import (
    CANARIES,
    MEMBERSHIP,
    AttackPlan,
    Situation,
    canary_findings,
    membership_findings,
)
from polyfed.lab.analysis.leakage.figures import Finding
from polyfed.lab.analysis.leakage.replies import seen_round
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.lab.analysis.simulated import Simulated
from polyfed.reporting.run_tables import table_json
from polyfed.reporting.tables import TextTable
from polyfed.runs.experiment import Experiment

_AUC = {"AUC": "{auc[value]:.2f} [{auc[low]:.2f}, {auc[high]:.2f}]"}


class AttackKind(NamedTuple):
    """How it is done, and how its table is made of its figures: heading -> format."""

    findings: Callable[[Situation], Iterator[Finding]]
    title: str
    columns: Mapping[str, str]
    note: str


_ATTACKS = {
    MEMBERSHIP: AttackKind(
        membership_findings,
        "was this sample trained on",
        _AUC
        | {"told at 1 %": "{tpr_at_1_percent[value]:.2f} [{tpr_at_1_percent[low]:.2f}, {tpr_at_1_percent[high]:.2f}]"}
        | {"members": "{members}", "others": "{others}"},
        "AUC: chance is 0.5. Told at 1 %: share of members that are told when at most 1 % of the others are taken for "
        "members. In brackets: intervals of 95 % (bootstrap; exact).",
    ),
    CANARIES: AttackKind(
        canary_findings,
        "random labels of canaries",
        _AUC
        | {"exposure": "{exposure:.2f}", "without": "{without:.2f}", "highest": "{highest:.2f}"}
        | {"canaries": "{canaries}"},
        "Exposure: log2 of the number of classes over the label's rank; without: of the same labels where nobody was "
        "trained on them. AUC of one against the other: chance is 0.5.",
    ),
}


def run_leakage(opened: Simulated, plan: AttackPlan) -> AnalysisResult:
    """Attack what clients sent in the last round of a simulated run, and its models.

    Raises:
        ConfigError: the plan is impossible, or nobody has sent anything.
        RunError: the run's state before its last round is lost.
    """
    for name in plan.attacks:
        if name not in _ATTACKS:
            raise ConfigError(f"--attacks {name}: {nearest(name, _ATTACKS)}")
    if plan.shadows % 2 or plan.shadows == 2:
        raise ConfigError(f"--shadows {plan.shadows}: give 0, or an even number from 4 on: half see each sample")
    with cpu_threads(opened.experiment.run.threads), seen_round(opened) as seen:
        situation = Situation(opened, seen, plan)
        results = {name: list(kind.findings(situation)) for name, kind in _ATTACKS.items() if name in plan.attacks}
    findings = {name: [one for one in every if one.figures] for name, every in results.items()}
    unattacked = [one for every in results.values() for one in every if not one.figures]
    method, protection = opened.experiment.algorithm.component_name(), protection_of(opened.experiment)
    exact = "to the bit" if seen.is_exact else "but for rounding: this machine computes other bits than the run's"
    about = (
        f"Method: {method}. Protection: {protection}. Replies of round {seen.number}, asked again, {exact}. An attack "
        "that finds nothing proves nothing: others may be better. One that is too weak where nothing protects is no "
        "measurement."
    )
    tables = _tables(opened.run.name, findings, unattacked)
    tables[:1] = [replace(table, notes=(*table.notes, about)) for table in tables[:1]]
    content = {
        "run": opened.run.name,
        "round": seen.number,
        "method": method,
        "protection": protection,
        # whether the replies are those of the run to the bit
        "exact": seen.is_exact,
        "plan": asdict(plan),
        "findings": {name: [one.to_json() for one in found] for name, found in findings.items()},
        "no_attack": [one.to_json() for one in unattacked],
        "tables": [table_json(table) for table in tables],
    }
    return AnalysisResult(content, tables)


def _tables(run: str, findings: Mapping[str, Sequence[Finding]], unattacked: Sequence[Finding]) -> list[TextTable]:
    """A table for each kind of attack, and one of what was not attacked."""
    tables = []
    for name, found in findings.items():
        kind = _ATTACKS[name]
        rows = [
            (one.on, one.attack, *(shown.format(**one.figures) for shown in kind.columns.values()), one.says)
            for one in found
        ]
        if rows:
            columns = ("attacked", "by", *kind.columns, "gave away")
            tables.append(TextTable(f"{run} gave away: {kind.title}", columns, rows, (kind.note,)))
    if unattacked:
        rows = [(one.on, one.attack, one.says) for one in unattacked]
        tables.append(TextTable(f"{run}: no attack here", ("what", "attack", "because"), rows))
    return tables


def protection_of(experiment: Experiment) -> str:
    """What protects replies, in words."""
    privacy, parts = experiment.policy.privacy, list[str]()
    if privacy is not None and privacy.reply is not None:
        parts.append(f"noise on replies (multiplier {privacy.reply.noise_multiplier:.3g})")
    if privacy is not None and privacy.samples is not None:
        parts.append(f"DP-SGD (multiplier {privacy.samples.noise_multiplier:.3g})")
    if experiment.aggregation.secure is not None:
        parts.append("secure aggregation")
    return " and ".join(parts) or "none"
