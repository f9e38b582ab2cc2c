"""Pages of results from records: docs/results/, blocks of other pages, docs/reproduction.md, and figures of speed.

    python scripts/pages.py                        # from the records in docs/results
    python scripts/pages.py --from runs/studies    # take over what was run of polyfed's own studies before

A record is ``study.yaml`` and ``results.json`` of a study's folder; `make bench` writes that of all benchmarks. Equal
records give equal bytes, and a test compares pages with records, so that no page is edited by hand. Blocks stand in
docs/results.md (what was run), the README and the papers' pages (what holds and where), mkdocs.yml (the menu), and
docs/reference/speed.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.files import write_atomically
from polyfed.lab.studies.figures import draw_study
from polyfed.lab.studies.results import RESULTS, STUDY, Results
from polyfed.lab.studies.study import Drawing
from polyfed.reporting.figures import svg_text
from study_records import (
    StudyRecord,
    evidence_section,
    evidence_table,
    folder_name,
    gains_table,
    index_text,
    ledger_text,
    papers_own,
    record_pictures,
    record_text,
    records,
)

ROOT = Path(__file__).resolve().parents[1]
HOME = Path("docs/results")
GAINS, GAIN = (
    Path("docs/images/gains.svg"),
    "polyfed/leaderboard-scarce",
)  # the README's picture, and the study that it shows
GAIN_NAMES = {
    "server alone": "server alone, tuned",
    "change distillation": "[change distillation](docs/explanation/change-distillation.md), polyfed's own",
    "no private data": "change distillation, clients without private data (control)",
    "pooled": "all data in one place (ceiling)",
    "procrustes mean": "[procrustes mean](docs/explanation/representation-exchange.md#spaces-that-are-not-the-same)",
    "similarity": "CreamFL's exchange, learnt by similarities",
    "creamfl": "[CreamFL](docs/explanation/creamfl.md)",
    "fedafd": "[FedAFD](docs/explanation/fedafd.md)",
}
PAPERS_READ = (
    "Primary claims of the papers' tables and figures, [re-run at a small scale](docs/reproduction.md) and judged by "
    "paired seeds:"
)
SPEED, BENCHMARKS = Path("docs/reference/speed.md"), Path("benchmarks/record.json")
BEGIN, END = "made by: make pages", "end of what make pages makes"
_MARKS: Mapping[str, tuple[str, str]] = {".md": ("<!-- ", " -->\n"), ".yml": ("      # ", "\n")}

# page, as links from docs/ have it, and what is claimed
PAPERS = {
    "CreamFL": ("explanation/creamfl.md", "contrastive weights of clients' representations teach a server best"),
    "FedCola": ("explanation/fedcola.md", "blocks that modalities share serve paired clients better than FedAvg"),
    "FedAFD": ("explanation/fedafd.md", "alignment and fusion lift every client, similarity weights the server"),
    "FedAID": ("explanation/fedaid.md", "hospitals weighed by their losses pre-train better and fairer than FedAvg"),
    "change distillation": (
        "explanation/change-distillation.md",
        "changes by training teach a server of few pairs",
    ),
}


def take_over(found: Iterable[StudyRecord], home: Path, root: Path = ROOT) -> None:
    """Copy the records of studies that were run."""
    for record in found:
        folder = root / HOME / folder_name(record.name, record.scale)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (STUDY, RESULTS):
            shutil.copy(home / folder.name / name, folder / name)


def with_block(path: Path, block: str) -> str:
    """The text of a file with another block between its marks."""
    before, after = _MARKS[path.suffix]
    begin, end = f"{before}{BEGIN}{after}", f"{before}{END}{after}"
    head, _, others = path.read_text(encoding="utf-8").partition(begin)
    _, found, tail = others.partition(end)
    if not found:
        raise SystemExit(f"{path.name}: no block between {begin.strip()!r} and {end.strip()!r}")
    return f"{head}{begin}{block}{end}{tail}"


def blocks(recorded: Sequence[StudyRecord]) -> dict[str, str]:
    """File -> what stands between its marks."""
    own = {name: papers_own(name, recorded) for name in PAPERS}
    told = [(name, claim, f"docs/{page}", own[name]) for name, (page, claim) in PAPERS.items() if own[name]]
    menu = "".join(f"      - results/{record.page}\n" for record in recorded)
    return {
        "docs/results.md": f"\n{index_text(recorded, HOME.name)}\n",
        "README.md": f"\n{_gains_of(recorded)}{evidence_table(told)}\n",
        **{
            f"docs/{page}": f"\n{evidence_section(own[name], f'../{HOME.name}')}\n"
            for name, (page, _) in PAPERS.items()
        },
        "mkdocs.yml": menu,
    }


def _gains_of(recorded: Sequence[StudyRecord]) -> str:
    """The README's table of one study, and the sentence between it and the next table."""
    shown = "".join(gains_table(record, "R@1 sum", GAIN_NAMES) for record in recorded if record.name == GAIN)
    return f"{shown}\n{PAPERS_READ}\n\n"


def speed_text(record: Mapping[str, Any]) -> str:
    """What all benchmarks measured, and which limits are not met."""
    of = record["machine"]
    lines = [
        f"Commit {record['commit']}, {record['date']}, one thread; {of['cores']} cores ({of['system']}, "
        f"{of['processor']}), Python {of['python']}, torch {of['torch']}.",
        "",
        "| by | what | measured | limit | against |",
        "|---|---|---:|---:|---|",
    ]
    for each in record["benchmarks"]:
        name = f"`{each['benchmark'].split()[0]}.py`"
        lines += [f"| {name} | {_figure(figure)} |" for figure in each["figures"]]
        lines += [f"| {name} | **failed** | | | |"] if each["failed"] else []
        lines += [f"| {name} | not run: lacks {each['lacks']} | | | |"] if each["lacks"] else []
    run = {each["benchmark"].split()[0] for each in record["benchmarks"]}
    left = dict.fromkeys(command.split()[0] for command in record["plan"])
    lines += [f"| `{name}.py` | **not run** for this table | | | |" for name in left if name not in run]
    return "\n".join(lines)


def _figure(figure: Mapping[str, Any]) -> str:
    measured = f"{figure['ratio']:g} {figure['unit']}".strip()
    measured = f"**{measured}, not met**" if figure["within"] is False else measured
    sign = "≤" if figure["better"] == "smaller" else "≥"
    limit = "" if figure["limit"] is None else f"{sign} {figure['limit']:g}"
    return f"{figure['name']} | {measured} | {limit} | {figure['against']}"


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Path of each page -> its text."""
    recorded = records(root / HOME)
    return {
        **{root / HOME / record.page: record_text(record) for record in recorded},
        **{root / name: with_block(root / name, block) for name, block in blocks(recorded).items()},
        root / SPEED: with_block(root / SPEED, f"\n{speed_text(json.loads((root / BENCHMARKS).read_text()))}\n\n"),
        root / "docs/reproduction.md": ledger_text(recorded),
    }


def pictures(root: Path = ROOT) -> dict[Path, str]:
    """Path of each map, and of the README's picture -> SVG; another version of matplotlib may place texts otherwise."""
    recorded = records(root / HOME)
    maps = {root / HOME / name: text for record in recorded for name, text in record_pictures(record).items()}
    shown = [record.results for record in recorded if record.name == GAIN and record.results]
    return {**maps, root / GAINS: _gains(shown[0])} if shown else maps


def _gains(results: Results) -> str:
    """What each row gains over the first, with its interval."""
    return svg_text(draw_study(results, Drawing(column="R@1 sum", minus=True), HOME), results.study.title)


def main() -> int:
    """Write all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="home", type=Path, help="folder of studies that were run")
    options = parser.parse_args()
    if options.home is not None:
        found = records(options.home)
        if not found:
            raise SystemExit(f"--from {options.home}: no study of polyfed's own was run there")
        take_over(found, options.home)
    for path, text in {**pages(), **pictures()}.items():
        write_atomically(path, text.encode())
        print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
