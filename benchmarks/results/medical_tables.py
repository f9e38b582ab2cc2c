"""The rows of the tables that ``medical.py`` makes, and which of them belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

RATE = "clients.hospital.training.optimizer.lr"
HEADS: Mapping[str, tuple[str, ...]] = {
    "pneumonia": ("pneumonia 1 %", "10 %", "100 %", "AUROC 10 %"),
    "covidx": ("covidx 1 %", "10 %"),
    "opacity": ("Dice opacity 10 %", "100 %"),
    "clients": ("Rec@1", "Rec@5", "worst@1", "worst@5", "disparity@5"),
    "other": ("other set Rec@5",),
}
SWEEPS = ("clients", "batches", "rho", "guidance")
"""Tables whose rows, but those that ``main`` has too, are put to retrieval only."""


@dataclass(frozen=True)
class Row:
    """A row: preset, overrides, whose learning rate it shares, and whose models are tested.

    Attributes:
        tested: the server's model, or the mean over the ``clients``' own.
        judged_by: the row whose clients' test samples retrieval is judged by; empty: its own.
    """

    preset: str
    overrides: tuple[str, ...] = ()
    rate_of: str = ""
    tested: str = "server"
    judged_by: str = ""


def _fedaid(*overrides: str) -> Row:
    return Row("fedaid-medpix", overrides, "fedaid")


def _fedavg(*overrides: str) -> Row:
    return Row("medpix-fedavg", overrides, "fedavg")


def _task(row: Row, task: str) -> Row:
    """The same with another objective."""
    both = tuple(f"{participant}.task={task}" for participant in ("server", "clients.hospital"))
    return replace(row, overrides=(*row.overrides, *both))


GLORIA = "{name: gloria, mask_siblings: true, in_batch: 64}"
MGCA = "{name: mgca, mask_siblings: true, in_batch: 64, prototypes: 100, freeze_prototypes_steps: 20}"


def _rows(base: str) -> dict[str, Row]:
    return {
        "local": Row(f"{base}-local", tested="clients"),
        "fedavg": Row(f"{base}-fedavg"),
        "fedaid": Row(f"fedaid-{base}"),
        "feddra": Row(f"{base}-feddra"),
        "centralised": Row(f"{base}-centralised", judged_by="fedavg"),
    }


MAIN = _rows("medpix") | {
    "feddra, as released": Row("medpix-feddra-released", rate_of="feddra"),
    "untrained": Row("medpix-fedavg", ("run.rounds=1", "algorithm.local_steps=1", f"{RATE}=1e-12"), "fedavg"),
    "fedprox": Row("medpix-fedprox", rate_of="fedavg"),
    "moon": Row("medpix-moon", rate_of="fedavg"),
    "fedema": Row("medpix-fedema"),
    "fed-mae": Row("medpix-fed-mae", rate_of="fedavg"),
}
ORDER = ("untrained", "local", "fedavg", "fedprox", "moon", "fedema", "fed-mae", "fedaid", "feddra")
FEDAVG_20, FEDAID_10_10 = MAIN["fedavg"], MAIN["fedaid"]
TWINS = {"fedavg": FEDAVG_20, "fedaid": FEDAID_10_10}
TABLES: Mapping[str, Mapping[str, Row]] = {
    "main": {name: MAIN[name] for name in (*ORDER, "feddra, as released", "centralised")},
    "cxr": {
        name: replace(row, rate_of="fedavg") if name in ("fedaid", "feddra") else row
        for name, row in _rows("cxr").items()
    },
    "backbones": TWINS
    | {
        f"{method} {name}": _task(row, task)
        for name, task in (("gloria", GLORIA), ("mgca", MGCA))
        for method, row in (("fedavg", _fedavg()), ("fedaid", _fedaid()))
    },
    "clients": TWINS
    | {
        f"{method}, 2 clients": replace(row, overrides=("clients.hospital.count=2",))
        for method, row in (("fedavg", _fedavg()), ("fedaid", _fedaid()))
    },
    "batches": TWINS
    | {
        "fedaid, 20 + 20 batches": _fedaid("algorithm.local_steps=20", "algorithm.robust_steps=20"),
        "fedavg, 10 batches": _fedavg("algorithm.local_steps=10"),
        "fedavg, 40 batches": _fedavg("algorithm.local_steps=40"),
    },
    "rho": {"fedaid": FEDAID_10_10}
    | {
        f"rho {rho:g}, gamma {gamma:g}": _fedaid(f"algorithm.rho={rho}", f"algorithm.gamma={gamma}")
        for rho, gamma in ((1e-7, 0.5), (0.1, 5.0), (1.0, 5.0), (1.0, 50.0))
    },
    "guidance": TWINS
    | {f"guidance {factor:g}": _fedaid(f"algorithm.guidance_weight={factor}") for factor in (0.0, 0.1, 10.0)}
    | {
        "averaged aligner": Row("fedaid-averaged-aligner", rate_of="fedaid"),
        "averaged aligner, 20 batches": Row("fedaid-averaged-aligner", ("algorithm.local_steps=20",), "fedaid"),
        "contrastive guidance": Row("fedaid-contrastive-guidance", rate_of="fedaid"),
        "beta 0": _fedaid("algorithm.beta=0"),
    },
}
PAIRS: Mapping[str, Sequence[tuple[str, str]]] = {
    "main": [(name, "fedavg") for name in (*ORDER[1:], "feddra, as released") if name != "fedavg"],
    "cxr": [(name, "fedavg") for name in ("local", "fedaid", "feddra")],
    "backbones": [("fedaid", "fedavg"), ("fedaid gloria", "fedavg gloria"), ("fedaid mgca", "fedavg mgca")],
    "clients": [("fedaid", "fedavg"), ("fedaid, 2 clients", "fedavg, 2 clients")],
    "batches": [  # as many batches in all, then as many of the encoders
        ("fedaid", "fedavg"),
        ("fedaid, 20 + 20 batches", "fedavg, 40 batches"),
        ("fedaid", "fedavg, 10 batches"),
        ("fedaid, 20 + 20 batches", "fedavg"),
    ],
    "rho": [(name, "fedaid") for name in ("rho 1e-07, gamma 0.5", "rho 1, gamma 5", "rho 1, gamma 50")]
    + [("rho 0.1, gamma 5", "rho 1, gamma 5")],
    "guidance": [
        *((f"guidance {factor}", "fedaid") for factor in ("0", "0.1", "10")),
        ("averaged aligner", "fedaid"),
        ("contrastive guidance", "fedaid"),
        ("beta 0", "fedaid"),
        ("averaged aligner, 20 batches", "fedavg"),
    ],
}
"""Rows that differ in one thing, or are methods at one budget: their differences are printed by seed."""


def tasks_of(table: str, row: Row | None = None) -> list[str]:
    """The tasks that a table shows, or that one of its rows is put to: one that ``main`` has too, to all."""
    return list(HEADS) if table not in SWEEPS or row in MAIN.values() else ["clients"]


def selected(table: str, only: Sequence[str]) -> dict[str, Row]:
    """The rows of a table that are asked for, with those that they are compared with or judged by; without: all."""
    rows = TABLES[table]
    wanted = {name for name in rows if name in only}
    beside = {other for name, other in PAIRS[table] if name in wanted} | {rows[name].judged_by for name in wanted}
    return {name: row for name, row in rows.items() if not only or name in wanted | beside}
