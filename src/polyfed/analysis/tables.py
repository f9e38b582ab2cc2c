"""Results of analyses as tables for a terminal."""

from __future__ import annotations

from itertools import pairwise

from polyfed.analysis.centres import Centres
from polyfed.analysis.domain_gap import DomainGaps
from polyfed.analysis.run_landscape import Landscape
from polyfed.analysis.scaling import Scaling
from polyfed.analysis.shapley import Contributions
from polyfed.reporting.compare import Spread
from polyfed.reporting.tables import TextTable, count, figure


def shapley_tables(found: Contributions) -> list[TextTable]:
    """Values, and the utilities that they come from."""
    seeds = len(next(iter(found.utilities.values())))
    values = [(player, str(spread)) for player, spread in found.spreads.items()]
    utilities = [(label, str(Spread.of(list(by.values())))) for label, by in found.utilities.items()]
    note = f"Mean over {seeds} seed{'s' * (seeds > 1)}{' ± standard deviation' * (seeds > 1)}."
    return [
        TextTable("Utility of each coalition", ("clients that take part", found.metric), utilities, (note,)),
        TextTable("Shapley values", ("client type", f"share of {found.metric}"), values, ("They sum to all - none.",)),
    ]


def scaling_table(found: Scaling) -> TextTable:
    """The metric with 0, 1, 2, ... steps, and what each step changed."""
    joined = ["none", *(" and ".join(step) for step in found.steps)]
    means = [spread.mean for spread in found.spreads]
    changes = ["", *(f"{after - before:+,.2f}" for before, after in pairwise(means))]
    rows = [
        (f"{number}: {name}", str(spread), change)
        for number, (name, spread, change) in enumerate(zip(joined, found.spreads, changes, strict=True))
    ]
    return TextTable("More groups of clients", ("that joined", found.metric, "change"), rows)


def gap_table(found: DomainGaps) -> TextTable:
    """One row for each data set and modality that was compared."""
    rows = [
        (f"{found.anchor} - {other}, {modality}", figure(value, 4), count(found.counts[other][modality]))
        for other, by_modality in found.gaps.items()
        for modality, value in by_modality.items()
    ]
    scale = "unit norm" if found.normalise else "not normalised"
    note = f"L2 distance of mean embeddings ({scale}) by {found.encoders}; split {found.split}."
    return TextTable(
        "Gaps between data sets", ("between", "gap", "samples"), [*rows, ("sum", figure(found.total(), 4), "")], (note,)
    )


def landscape_table(found: Landscape) -> TextTable:
    """Eigenvalues, and how far the loss rises."""
    pairs = zip(found.pairs.values.tolist(), found.pairs.residuals.tolist(), strict=True)
    rows = [(f"eigenvalue {k}", f"{value:.5g} ± {residual:.1g}") for k, (value, residual) in enumerate(pairs, start=1)]
    facts = found.to_json()
    rows += [(name, f"{facts[name.replace(' ', '_')]:.5g}") for name in ("loss", "greatest loss", "mean rise")]
    note = (
        f"Task loss on {found.samples} samples of {found.data}; weights (L2 norm {found.norm:.4g}) moved by up to "
        f"{found.extent:g} along each eigenvector; {found.pairs.steps} Hessian-vector products."
    )
    return TextTable(f"{found.run}, server model of round {found.round}", ("", "value"), rows, (note,))


def centres_table(found: Centres, most: int = 40) -> TextTable:
    """Distances of all pairs of centres, the farthest first."""
    distances = found.distances
    size = len(found.names)
    pairs = [(i, j) for i in range(size) for j in range(i + 1, size)]
    pairs.sort(key=lambda pair: -float(distances.euclidean[pair]))
    rows = [
        (
            f"{found.names[i]} - {found.names[j]}",
            figure(float(distances.euclidean[i, j]), 4),
            figure(float(distances.cosine[i, j]), 4),
        )
        for i, j in pairs[:most]
    ]
    rest = len(pairs) - len(rows)
    notes = (f"The farthest {most}; {rest} more are in the JSON file.",) if rest else ()
    return TextTable(
        f"{found.run}, round {found.round}: distances of centres", ("between", "Euclidean", "cosine"), rows, notes
    )
