"""Drift, weights, features and bytes as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.analysis.drift import Drift, ModalityDrift, Pairs
from polyfed.analysis.fused_features import Features
from polyfed.analysis.round_weights import ChannelWeights, RunWeights
from polyfed.analysis.traffic import DIRECTIONS, Traffic
from polyfed.reporting.tables import TextTable, count, figure, mib

_DRIFT_COLUMNS = ("", "round", "distance to clients", "CKA", "distance to server", "CKA")
_MEANS = {
    "all": "all pairs",
    "same": "same group",
    "different": "different groups",
    "server": "client and server",
}


def drift_tables(found: Drift) -> list[TextTable]:
    """One table a modality: each client, then means over pairs."""
    return [_drift_table(found, each) for each in found.modalities]


def _drift_table(found: Drift, each: ModalityDrift) -> TextTable:
    rows = [_drift_row(each, place) for place in each.clients]
    means = {kind: each.between(kind) for kind in ("all", "same", "different")}
    rows += [(f"mean, {_MEANS[kind]} ({pairs.count})", "", *_cells(pairs), "", "") for kind, pairs in means.items()]
    server = each.between("server")
    rows.append((f"mean, {_MEANS['server']} ({server.count})", "", "", "", *_cells(server)))
    note = (
        f"Mean distance of unit vectors (0 to 2), and debiased linear CKA, of the same {found.samples} public samples; "
        "round: after which the model was kept."
    )
    return TextTable(f"{found.run}: drift of {each.modality}", _DRIFT_COLUMNS, rows, (note,))


def _drift_row(each: ModalityDrift, place: int) -> tuple[str, ...]:
    server = each.over([] if each.server is None else [(place, each.server)])
    return (each.names[place], str(each.rounds[place]), *_cells(each.of_client(place)), *_cells(server))


def _cells(pairs: Pairs) -> tuple[str, str]:
    return figure(pairs.distance, 3), figure(pairs.alignment, 3)


def weights_tables(found: RunWeights) -> list[TextTable]:
    """One table a channel: kinds of clients, then each client."""
    return [_weights_table(found, each) for each in found.channels]


def _weights_table(found: RunWeights, each: ChannelWeights) -> TextTable:
    shares = {f"{kind} ({share.clients})": share for kind, share in each.shares().items()} | each.by_client()
    rows = [
        (name, figure(share.mean, 4), figure(share.relative), figure(share.total, 3), figure(100 * share.leading, 1))
        for name, share in shares.items()
    ]
    note = (
        f"Over {count(each.values.shape[1])} recorded public samples. Effective number of clients: "
        f"{figure(each.effective)} of {len(each.clients)}."
    )
    columns = ("clients", "mean weight", "times equal", "together", "heaviest on %")
    return TextTable(f"{found.run}, round {each.round}: weights of {each.channel}", columns, rows, (note,))


def features_table(found: Features) -> TextTable:
    """One row a kind of features."""
    rows = [
        (
            kind,
            figure(each.separation.silhouette, 3),
            figure(each.separation.ratio, 3),
            figure(each.separation.nearest_mean),
            figure(each.metrics[found.primary]),
        )
        for kind, each in found.found.items()
    ]
    columns = ("features", "silhouette", "between / within", "nearest mean %", f"own head: {found.primary}")
    facts = found.to_json()
    note = f"{facts['samples']} test samples of {facts['classes']} classes. The head was trained on fused features."
    return TextTable(f"{found.run}: features of {found.client}, round {found.round}", columns, rows, (note,))


def traffic_tables(runs: Sequence[Traffic]) -> list[TextTable]:
    """Runs side by side: totals, then what a client sends and receives in a round, by kind."""
    totals = [
        (
            run.label,
            str(run.rounds),
            str(len(run.by_client)),
            *(mib(run.total(way)) for way in DIRECTIONS),
            mib(sum(map(run.total, DIRECTIONS))),
            mib(run.beside),
        )
        for run in runs
    ]
    kinds = [
        (f"{run.label}: {kind}", *(f"{run.kind_a_round(kind, way):,.0f}" for way in DIRECTIONS))
        for run in runs
        for kind in run.by_kind
    ]
    columns = ("run (method)", "rounds", "clients", "MiB down", "MiB up", "MiB in all", "evaluation MiB")
    note = "Evaluation of clients and preparation are not in the other columns."
    return [
        TextTable("Bytes of each run", columns, totals, (note,)),
        TextTable("A client in a round in which it took part", ("run: kind", "bytes down", "bytes up"), kinds),
    ]
