"""What a run gave away: all attacks, their tables and their picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from polyfed.core.device import cpu_threads
from polyfed.lab.analysis.leakage.canaries import CANARY_COLUMNS, canary_findings
from polyfed.lab.analysis.leakage.classes import CLASS_COLUMNS, class_findings
from polyfed.lab.analysis.leakage.figures import AttackResult, Found, NoAttack
from polyfed.lab.analysis.leakage.membership_attacks import COLUMNS, MembershipAttacks
from polyfed.lab.analysis.leakage.pictures import PICTURE_COLUMNS, picture_findings
from polyfed.lab.analysis.leakage.seen import seen_round
from polyfed.lab.analysis.leakage.situation import ATTACKS, AttackPlan, Situation
from polyfed.lab.analysis.leakage.words import WORD_COLUMNS, word_findings
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.lab.analysis.simulated import Simulated
from polyfed.reporting.figures import COLOURS, empty_figure, styled
from polyfed.reporting.saved_tables import table_json
from polyfed.reporting.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLES: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "membership": (
        "was this sample trained on",
        COLUMNS,
        "AUC: chance is 0.5. Told at 1 %: share of members that are told when at most 1 % of the others are taken for "
        "members. In brackets: intervals of 95 % (bootstrap; exact).",
    ),
    "words": (
        "words of the texts",
        WORD_COLUMNS,
        "Precision and recall of recovered words; the guess takes as many, the most frequent of test texts.",
    ),
    "pictures": (
        "pictures from the gradient of one batch",
        PICTURE_COLUMNS,
        "dB, to the nearest reconstruction; guess: to the nearest of as many test pictures and their mean. The "
        "attacker gets one step's gradient and all of the batch but its pictures, which is more than crosses after "
        "several steps.",
    ),
    "canaries": (
        "random labels of canaries",
        CANARY_COLUMNS,
        "Exposure: log2 of the number of classes over the label's rank; without: of the same labels where nobody was "
        "trained on them. AUC of one against the other: chance is 0.5.",
    ),
    "classes": ("classes that a client has more of", CLASS_COLUMNS, "AUC over clients and classes: chance is 0.5."),
}


@dataclass(frozen=True)
class Leakage(AnalysisResult):
    """What a run gave away.

    Attributes:
        run: its name.
        round: whose replies were attacked; the last.
        method: of the run.
        protection: what protects replies, in words.
        is_exact: whether the replies are those of the run to the bit.
        plan: of the attacks.
        findings: attack -> what it found.
        unattacked: where an attack does not apply.
    """

    run: str
    round: int
    method: str
    protection: str
    is_exact: bool
    plan: AttackPlan
    findings: Mapping[str, tuple[AttackResult, ...]]
    unattacked: tuple[NoAttack, ...]

    def to_json(self) -> dict[str, Any]:
        """All figures, and the tables as the report shows them."""
        return {
            "run": self.run,
            "round": self.round,
            "method": self.method,
            "protection": self.protection,
            "exact": self.is_exact,
            "plan": asdict(self.plan),
            "findings": {name: [one.to_json() for one in found] for name, found in self.findings.items()},
            "no_attack": [one.to_json() for one in self.unattacked],
            "tables": [table_json(table) for table in self.tables()],
        }

    def tables(self) -> list[TextTable]:
        """A table for each kind of attack, and one of what was not attacked."""
        tables = [
            TextTable(f"{self.run} gave away: {title}", columns, [one.cells for one in self.findings[name]], (note,))
            for name, (title, columns, note) in _TITLES.items()
            if self.findings.get(name)
        ]
        rows = [(one.on, one.attack, one.reason) for one in self.unattacked]
        if rows:
            tables.append(TextTable(f"{self.run}: no attack here", ("what", "attack", "because"), rows))
        exact = "to the bit" if self.is_exact else "but for rounding: this machine computes other bits than the run's"
        about = (
            f"Method: {self.method}. Protection: {self.protection}. Replies of round {self.round}, asked again, "
            f"{exact}. An attack that finds nothing proves nothing: others may be better. One that is too weak where "
            "nothing protects is no measurement."
        )
        return [
            replace(table, notes=(*table.notes, about)) if not place else table for place, table in enumerate(tables)
        ]

    @styled
    def draw(self) -> Figure:
        """AUC with its interval of every attack that has one, against chance."""
        rows = [
            (name, one, one.figures["auc"])
            for name, found in self.findings.items()
            for one in found
            if isinstance(one.figures.get("auc"), dict)
        ]
        drawing = empty_figure(8.0, 1.4 + 0.3 * max(1, len(rows)), f"{self.run}: what it gave away")
        axes = drawing.subplots()
        for place, (name, _, auc) in enumerate(rows):
            assert isinstance(auc, dict)
            colour = COLOURS[ATTACKS.index(name) % len(COLOURS)]
            axes.plot([auc["low"], auc["high"]], [place, place], color=colour)
            axes.plot([auc["value"]], [place], "o", color=colour)
        axes.axvline(0.5, linestyle="--", color="grey")
        axes.set_yticks(range(len(rows)), [f"{one.on}: {one.attack}" for _, one, _ in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02)
        axes.set_xlabel("AUC (chance: 0.5)")
        return drawing


def run_leakage(opened: Simulated, plan: AttackPlan | None = None) -> Leakage:
    """Attack what clients sent in the last round of a simulated run, and its models.

    Args:
        opened: the run.
        plan: which attacks, and how much work.

    Raises:
        ConfigError: the plan is impossible, or nobody has sent anything.
        RunError: the run's state before its last round is lost.
    """
    plan = plan or AttackPlan()
    plan.require_range()
    findings: dict[str, tuple[AttackResult, ...]] = {}
    unattacked: list[NoAttack] = []
    with cpu_threads(opened.experiment.run.threads), seen_round(opened) as seen:
        situation = Situation(opened, seen, plan)
        for name in ATTACKS:
            if name in plan.attacks:
                results = list(_found(name, situation))
                findings[name] = tuple(one for one in results if isinstance(one, AttackResult))
                unattacked += [one for one in results if isinstance(one, NoAttack)]
        return Leakage(
            opened.run.name,
            seen.number,
            opened.experiment.algorithm.component_name(),
            protection_of(situation),
            seen.is_exact,
            plan,
            findings,
            tuple(unattacked),
        )


def _found(name: str, situation: Situation) -> Found:
    if name == "membership":
        return MembershipAttacks(situation).findings()
    by_name: dict[str, Callable[[Situation], Found]] = {
        "words": word_findings,
        "pictures": picture_findings,
        "classes": class_findings,
        "canaries": canary_findings,
    }
    return by_name[name](situation)


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
