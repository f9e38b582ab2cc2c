"""First tables of docs/results.md: what reaches a server from its clients, by method, size of P and kind of clients.

    python benchmarks/results/knowledge.py --data-dir DATA --weights-dir WEIGHTS --out runs/knowledge [--jobs 2]

All rows are the preset ``scarce-public`` with something else in place of its method, its public set or its clients; the
server makes as many joint passes over P in each. Rate and passes of the server alone, and pooled, are tuned on the
validation split for the first seed of each size and used for the others. Runs that are complete are not run again.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from knowledge_figure import draw_gains

from polyfed.reporting.compare import compare, comparison_table
from polyfed.reporting.paired import paired_differences, paired_table
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import open_run
from runs import Planned, arguments

Content = dict[str, Any]
METRIC = "r1_sum"
ALONE: Content = {"kind": "server-only", "rates": [0.5, 1, 2], "passes": [1, 2]}
TWINS: Mapping[str, Content] = {
    "server-only": ALONE,
    "pooled": ALONE | {"kind": "pooled", "passes": [1]},
    "no-private": {"kind": "no-private"},
}
PLAIN: Content = {"name": "creamfl", "inter": False, "intra": False, "kd_joint": True, "aggregation": "mean"}
METHODS: Mapping[str, Content] = {
    "change": {},
    "procrustes": {**PLAIN, "alignment": "procrustes", "kd_weight": 6},
    "similarity": {**PLAIN, "kd_loss": "similarity", "kd_temperature": 0.02},
    "mean": {**PLAIN, "kd_weight": 6},
    "creamfl": {
        "name": "creamfl",
        "tau_inter": 0.1,
        "tau_intra": 0.5,
        "aggregation": {"name": "gca", "tau": 0.05},
        "mask_siblings": True,
        "public_batch_size": 64,
        "kd_joint": True,
    },
    "fedmd": {"name": "fedmd", "digest_batch_size": 64, "kd_joint": True},
    "fedafd": {
        "name": "fedafd",
        "public_batch_size": 64,
        "kd_joint": True,
        "fuse": "embeddings",
        "aggregation": {"name": "sed", "temperature": 0.05},
    },
}
WEAK = {"name": "projection", "dropout": 0.2, "view": {"name": "features", "backbone": "mobilenet-v2-1.0-224"}}


def preset() -> Content:
    """``scarce-public``, every setting written out; nothing but the server is measured."""
    content: Content = yaml.safe_load(Experiment.load("scarce-public").to_yaml())
    return content | {"run": content["run"] | {"evaluate_clients": False, "plots": False}}


def with_method(base: Content, method: Content, *, paired_only: bool = True) -> Content:
    """Another method with as many local epochs and joint passes; image-text clients only, all of which take part."""
    content, own = copy.deepcopy(base), base["algorithm"]
    if method:
        content["algorithm"] = {**method, "local_epochs": own["local_epochs"], "kd_epochs": own["kd_epochs"]}
    if paired_only:
        content["clients"] = {"paired": content["clients"]["paired"]}
        content["run"]["sampling"] = {"kind": "uniform", "cohort": None}
        if not method:
            content["algorithm"]["counted_groups"] = None
    return content


def rows_of(items: int) -> dict[str, Content]:
    """Rows of the table of one size of P: methods and twins, then change distillation with other clients and items."""
    base = preset()
    base["public"] |= {"items": items, "unpaired": {}, "gallery": 0}
    rows = {name: with_method(base, method) for name, method in METHODS.items()}
    rows |= {f"{kind} twin": {**rows["change"], "twin": twin} for kind, twin in TWINS.items()}
    rows |= {f"{name}, weak clients": with_weak_clients(rows[name]) for name in ("change", "procrustes")}
    rows["change, 500 pictures and 500 texts without partner"] = unpaired = copy.deepcopy(rows["change"])
    unpaired["public"]["unpaired"] = {"image": 500, "text": 500}
    for how, counted in {"not counted": ["paired"], "counted": None}.items():
        every = with_method(base, {}, paired_only=False)
        every["algorithm"]["counted_groups"] = counted
        rows[f"change, CIFAR-100 and AG_NEWS clients {how}"] = every
    return rows


def with_weak_clients(content: Content) -> Content:
    """The same with MobileNetV2 features in place of the server's DeiT-tiny."""
    content = copy.deepcopy(content)
    for model in content["clients"]["paired"]["models"]:
        model["encoders"]["image"] = WEAK
    return content


def by_modality() -> dict[str, Content]:
    """Rows of the table of clients of one modality, 500 pairs: beside 1,000 private pairs, and instead of any."""
    base = preset()
    base["public"] |= {"items": 500, "unpaired": {}, "gallery": 0}
    paired, labelled = with_method(base, {}), with_method(base, {}, paired_only=False)
    paired["clients"]["paired"] |= {"count": 4, "items": 1000}
    labelled["algorithm"]["counted_groups"] = None
    labelled["clients"].pop("paired")
    labelled["run"]["sampling"] = {"kind": "uniform", "cohort": 4}
    # four clients a modality share all private pictures, or all private captions
    model = paired["clients"]["paired"]["models"][0]
    one = {**paired["clients"]["paired"], "items": None, "task": {"name": "alignment_uniformity"}}
    # in trials a contrast at five times the rate moved texts out of the pictures' reach
    optimizer = {**one["training"]["optimizer"], "lr": 0.0001}
    one["training"] = {**one["training"], "batch_size": 512, "optimizer": optimizer}
    groups = {
        name: {**one, "models": [{**model, "encoders": {modality: model["encoders"][modality]}}]}
        for name, modality in (("pictures", "image"), ("captions", "text"))
    }

    def rows(*names: str) -> Content:
        return {**paired, "clients": {name: (paired["clients"] | groups)[name] for name in names}}

    return {
        "pictures": rows("pictures"),
        "captions": rows("captions"),
        "pictures and captions": rows("pictures", "captions"),
        "CIFAR-100 and AG_NEWS": labelled,
        "1000 pairs": rows("paired"),
        "1000 pairs, with pictures and captions": rows("paired", "pictures", "captions"),
        "server-only twin": {**paired, "twin": ALONE},
    }


def planned(out: Path, rows: Mapping[str, Content], table: str, seeds: Iterable[int]) -> list[list[Planned]]:
    """The runs of a table, row by row; of a row that is tuned the first run comes before the others."""
    configs = out / "configs"
    configs.mkdir(parents=True, exist_ok=True)
    runs = []
    for name, content in rows.items():
        row = f"{table}-{name}".replace(" ", "-").replace(",", "")
        path = configs / f"{row}.yaml"
        path.write_text(yaml.safe_dump({**content, "name": row}, sort_keys=False))
        first, *others = seeds
        tuned = out / f"{row}-{first}" / "config.yaml" if "rates" in (content.get("twin") or {}) else path
        runs.append([Planned(f"{row}-{first}", str(path), first)])
        runs[-1] += [Planned(f"{row}-{seed}", str(tuned), seed) for seed in others]
    return runs


def execute(row: Sequence[Planned], out: Path, data_dir: Path, weights_dir: Path) -> None:
    """The runs of a row, one after the other; of each its records alone are kept."""
    for run in row:
        run.execute(out, data_dir, weights_dir)
        shutil.rmtree(out / run.name / "models", ignore_errors=True)


def main() -> None:
    """Run what is missing and print the tables."""
    parser = arguments(__doc__, seeds=5)
    parser.add_argument(
        "--tables", nargs="*", help="pairs250, pairs500, pairs1000, pairs1500, modality; by default all"
    )
    parser.add_argument("--only", nargs="*", help="names of rows; by default all")
    parser.add_argument("--figure", type=Path, help="draw README's picture of the tables by method into this SVG file")
    options = parser.parse_args()
    tables = {f"pairs{items}": rows_of(items) for items in (250, 500, 1000, 1500)} | {"modality": by_modality()}
    tables = {
        table: {name: content for name, content in rows.items() if not options.only or name in options.only}
        for table, rows in tables.items()
        if not options.tables or table in options.tables
    }
    plans = {table: planned(options.out, rows, table, range(options.seeds)) for table, rows in tables.items()}
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = [row for plan in plans.values() for row in plan]
        for future in [pool.submit(execute, row, options.out, options.data_dir, options.weights_dir) for row in rows]:
            future.result()
    differences = {}
    for table, plan in plans.items():
        compared = compare([open_run(options.out / run.name).records for row in plan for run in row], METRIC)
        against = next((row[0].name for row in plan if "server-only" in row[0].name), None)
        print(f"\n### {table}\n", comparison_table(compared).markdown(), sep="\n")
        differences[table] = paired_differences(compared, METRIC, against=against)
        print(paired_table(differences[table], compared).markdown())
    if options.figure is not None:
        print(draw_gains(differences, options.figure))


if __name__ == "__main__":
    main()
