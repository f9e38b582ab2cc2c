"""Which method for whom: the tables of docs/how-to/which-method.md, whose figures are those of records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from boards import MODALITIES, OTHER, SAME
from polyfed.federation.sampling import SamplingSettings
from polyfed.lab.studies.cells import Places, resolve
from polyfed.lab.studies.columns.costs import ClientTraffic, TrafficColumn
from polyfed.lab.studies.study import SMALL, Point
from study_records import StudyRecord, comparison_text

PAGE = "docs/how-to/which-method.md"


class Answer(NamedTuple):
    """What somebody has or asks, what to take, and the two rows of a study that tell what it gains.

    ``study`` is empty where no study asks this. ``of`` is another study or row that has the bytes.
    """

    case: str
    take: str
    study: str = ""
    row: str = ""
    against: str = ""
    column: str = "R@1"
    point: Point = ()
    of: tuple[str, str] | None = None


ADAPTERS, T1 = "polyfed/adapters", "creamfl/t1"
ALONE, ZERO = "server alone", "zero-shot"
BARE, CHANGE, UNPAIRED = "alone", "change distillation", "change distillation, unpaired"
HOLDING = "fedavg, holding public pairs"
T2 = ("fedafd/t2", "MiB both")  # bytes by method
SIXTY = ("scenes", "60 %")
COLUMNS = {
    "R@1": "mean R@1",
    "r1_sum": "R@1 sum",
    "Rec@1": "R@1 at clients",
    "figure": "accuracy at clients",
    "image": "accuracy of pictures' clients",
    "paired i2t": "R@1 at pairs' clients",
    "server rsum": "R@1 sum",
    "time to 18": "seconds to R@10 of 18 % (less is better)",
}
ROWS = {
    "drop": "`fedavg`",
    "fedavg, sync": "waiting for all",
    "local": "each client alone",
    "lora 8, paired alone": "pairs' clients alone",
    "zero-shot": "untouched network",
}
"""Column, row of a study -> what the page calls it, where that says more."""

SECTIONS: Mapping[str, Sequence[Answer]] = {
    "What may clients share?": (
        Answer("weights, one network for all", "`fedavg`", SAME, "fedavg", BARE),
        Answer("", "`fedavg`, public pairs at clients", SAME, HOLDING, BARE),
        Answer("", "`fedprox`", SAME, "fedprox", BARE),
        Answer("", "`change_distillation`, unpaired public items", SAME, UNPAIRED, BARE),
        Answer("the same; clients of one modality as well", "`fediot`", "fedcola/t4", "fediot", "fedavg", "r1_sum"),
        Answer("", "`fedprox`", "fedcola/t4", "fedprox", "fedavg", "r1_sum"),
        Answer("", "`fedcola`", "fedcola/t4", "fedcola", "fedavg", "r1_sum"),
        Answer("", "`fedcola`, more pairs", "fedcola/regime", "fedcola", "fedavg", "r1_sum", ("3600",)),
        Answer("weights, hospitals that differ", "`fedaid`", "fedaid/parts", "fedaid", "fedavg", "Rec@1"),
        Answer("", "`fedaid`, as many batches", "fedaid/parts", "fedaid, 8 + 8", "fedavg", "Rec@1"),
        Answer("representations of public pairs, networks of their own", "`change_distillation`", OTHER, CHANGE, BARE),
        Answer("", "`change_distillation`, unpaired public items", OTHER, UNPAIRED, BARE),
        Answer("", "`creamfl`, teacher aligned by Procrustes", OTHER, "procrustes mean", BARE),
        *(
            Answer("", f"`{name}`", OTHER, name, BARE)
            for name in ("creamfl", "fedet", "fedmkd", "fedmd", "fedgems", "fedafd")
        ),
        Answer("", "control: clients without private data", OTHER, "no private data", BARE),
        Answer("the same, clients of one modality as well", "`change_distillation`", MODALITIES, CHANGE, BARE),
        Answer("", "`fedavg` by modality", MODALITIES, "fedavg", BARE),
        Answer(
            "the same, 500 pairs",
            "`creamfl`",
            "fedafd/t1",
            "creamfl",
            ALONE,
            "server rsum",
            of=T2,
        ),
        *(
            Answer("", f"`{name}`", "fedafd/t1", name, ALONE, "server rsum", of=T2)
            for name in ("fedmd", "fedafd", "fedet", "fedmkd")
        ),
        Answer(
            "clients of one modality as well, 100 pairs",
            "`creamfl`",
            "creamfl/regime",
            "creamfl",
            ALONE,
            "r1_sum",
            ("100",),
        ),
        Answer("the same, 1,000 pairs", "`creamfl`", "creamfl/regime", "creamfl", ALONE, "r1_sum", ("1000",)),
        Answer("adapters", "`fedit` with `lora`, rank 8", ADAPTERS, "lora 8", ZERO, "R@1 sum"),
        Answer(
            "adapters of unequal rank", "`hetlora`", "polyfed/adapters-ranks", "hetlora", "fedit, rank 2", "R@1 sum"
        ),
        Answer("", "`flora`", "polyfed/adapters-ranks", "flora", "fedit, rank 2", "R@1 sum"),
        Answer("nothing", "`local`", "polyfed/missing", "local", "drop", "figure", SIXTY),
    ),
    "Which modalities do clients have?": (
        Answer("pictures with captions", "`change_distillation`", "polyfed/demo", "federation", ALONE, "R@1 sum"),
        Answer(
            "clients of pictures alone, or texts alone, beside them",
            "`fedit`",
            ADAPTERS,
            "lora 8",
            "lora 8, paired alone",
            "R@1 sum",
        ),
        Answer(
            "samples that lack a picture or a text", "`fedavg`", "polyfed/missing", "drop", "local", "figure", SIXTY
        ),
        Answer("", "`change_distillation`", "polyfed/missing", "change distillation", "local", "figure", SIXTY),
        Answer("", "imputation `nearest`", "polyfed/missing", "nearest", "drop", "figure", SIXTY),
        Answer("pictures with questions (VQA)", "`creamfl`", "polyfed/vqa-daquar"),
        Answer("radiographs with reports", "`fedaid`"),
        Answer("sounds, tables; masks", "`fedavg`"),
    ),
    "How large is the network?": (
        Answer("frozen features, small heads", "`change_distillation`", OTHER, CHANGE, BARE),
        Answer("small, trained from scratch", "`change_distillation`", "polyfed/demo", "federation", ALONE, "R@1 sum"),
        Answer("pretrained", "prompts, `fedavg`", ADAPTERS, "prompts", ZERO, "R@1 sum"),
        Answer("", "`lora`, rank 8, `fedit`", ADAPTERS, "lora 8", ZERO, "R@1 sum"),
        Answer("", "last two layers, `fedavg`", ADAPTERS, "layers", ZERO, "R@1 sum"),
        Answer("", "all layers, `fedavg`", ADAPTERS, "all layers", ZERO, "R@1 sum"),
        Answer("", "a linear layer on it, `fedavg`", ADAPTERS, "linear", ZERO, "R@1 sum"),
        Answer(
            "another at each client, for the clients' own good",
            "`fedet`",
            "fedafd/t1",
            "fedet",
            "local",
            "image",
            of=T2,
        ),
        Answer("", "`fedafd`", "fedafd/t1", "fedafd", "local", "image", of=T2),
        Answer("", "`fedafd`, pairs", "fedafd/t1", "fedafd", "local", "paired i2t", of=T2),
    ),
    "Whom do they trust?": (
        Answer("the server, with sums alone", "`fedavg`, [masked sums](../explanation/secure-aggregation.md)"),
        Answer("nobody", "`fedavg`, [differential privacy](../explanation/privacy.md)", "polyfed/privacy"),
        Answer(
            "the server, not each other", "`fedavg`, [robust rules](../explanation/robustness.md)", "polyfed/robust"
        ),
        Answer(
            "all, and some are slow",
            "`fedavg`, [`run.pace: buffered`](../explanation/pace.md)",
            "polyfed/pace",
            "fedavg, buffered",
            "fedavg, sync",
            "time to 18",
            ("20",),
        ),
    ),
}


def which_method_text(shown: Sequence[StudyRecord]) -> str:
    """All tables; an answer whose runs no record has is not measured."""
    known = {record.name: record for record in shown if record.scale == SMALL}
    tables = []
    for heading, answers in SECTIONS.items():
        lines = [f"\n## {heading}\n", "|you have|take|gain, interval|in|MiB|record|", "|-|-|-:|-|-:|-|"]
        tables.append("\n".join([*lines, *(_line(answer, known) for answer in answers)]))
    return "\n".join(tables) + "\n"


def _line(answer: Answer, known: Mapping[str, StudyRecord]) -> str:
    record = known.get(answer.study)
    cells = [answer.case, answer.take, _gain(answer, record), "", "", ""]
    if answer.row:
        cells[3] = f"{COLUMNS.get(answer.column, answer.column)}, against {ROWS.get(answer.against, answer.against)}"
        cells[4] = _bytes(answer, known)
    if answer.study:
        paper = answer.study.partition("/")[0]
        cells[5] = f"[{answer.study}](../../papers/{paper}/README.md{f'#{record.anchor}' if record else ''})"
    return f"|{'|'.join(cells)}|"


def _gain(answer: Answer, record: StudyRecord | None) -> str:
    """``+39.2 (+37.4 to +41.0)``, and the verdict where a claim is on just that."""
    if record is None or not answer.row:
        return "not measured"
    comparison, verdict = record.results.against(answer.row, answer.against, answer.point, answer.column)
    if comparison is None:
        return "not measured"
    marks = "".join(dict.fromkeys(record.mark(row) for row in (answer.row, answer.against)))
    return f"{comparison_text(comparison)}{marks}" + (f", {verdict}" if verdict else "")


def _bytes(answer: Answer, known: Mapping[str, StudyRecord]) -> str:
    """MiB that a client sends and receives in a round."""
    study, column = answer.of or (answer.study, "")
    record = known.get(study)
    if record is None:
        return "not measured"
    point = () if answer.of else answer.point
    for name, settings in record.study.columns_of(answer.row).items():
        if name == (column or name) and isinstance(settings, ClientTraffic | TrafficColumn):
            if not record.results.at(answer.row, point, name):
                return "not measured"
            figure = record.results.spread(answer.row, point, name).mean
            return f"{figure / _shared(record, answer.row, point, settings):.2f}"
    return "not measured"


def _shared(record: StudyRecord, row: str, point: Point, settings: ClientTraffic | TrafficColumn) -> int:
    """How many clients and rounds a figure of bytes is the sum of."""
    if isinstance(settings, ClientTraffic):
        return len(settings.groups)
    experiment = resolve(record.study, row, point, Places())
    assert experiment.run.sampling == SamplingSettings(), "all clients are asked in each round"
    clients = sum(group.count for group in experiment.clients.values())
    return clients * (1 if settings.per == "round" else experiment.run.rounds)
