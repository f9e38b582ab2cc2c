"""Pages from records: those of papers/, blocks of other pages, and figures of speed.

    python scripts/pages.py                        # from the records in papers/*/records
    python scripts/pages.py --from runs/studies    # take over what was run of these studies before
    python scripts/pages.py --check                # only list records that contradict each other

A record is a study with its results, `make bench` writes that of all benchmarks. Equal records give equal bytes, and a
test compares pages with records. Blocks stand in the README, the papers' pages of docs/explanation,
docs/reference/speed.md, docs/how-to/which-method.md, and the tables behind it. Every call ends with exit status 1 if
`--check` lists any.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

import boards
import evidence
import gap_picture
import verdicts
import which_method
from polyfed.core.files import write_atomically
from polyfed.core.untrusted import markdown
from polyfed.lab.studies.results import RESULTS, Results
from polyfed.lab.studies.study import SMALL, Study
from polyfed.lab.studies.study_files import study_content
from polyfed.reporting.figures import COLOURS, GREY, figure_grid, styled, svg_text
from polyfed.reporting.markup import markdown_templates, resource
from record_checks import faults, standing
from study_pictures import Picture
from study_records import (
    OUTCOMES,
    PAPERS,
    SCALES,
    STUDIES,
    StudyRecord,
    cells,
    comparison_text,
    heading,
    outcome,
    place,
    record_path,
    record_text,
    table,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = PAPERS.parent
TEMPLATES = Path(__file__).parent / "templates"
NAMES = {"creamfl": "CreamFL", "fedcola": "FedCola", "fedafd": "FedAFD", "fedaid": "FedAID", "polyfed": "polyfed"}
"""Folder below papers/ -> its name."""
CLAIMED = ("creamfl", "fedcola", "fedafd", "fedaid")
"""Folders below papers/ of methods with a page."""
SPEED, BENCHMARKS = "docs/reference/speed.md", "benchmarks/record.json"
AHEAD_OF = "pfl_research"
COST = "docs/images/clients.svg"
COST_CAPTION = "Cost of a small client over a plain loop, by the number of clients; dashed: limits"
BEGIN, END = "<!-- made by: make pages -->\n", "<!-- end of what make pages makes -->\n"


def take_over(runs: Path, home: Path = PAPERS) -> int:
    """Write the records of studies that were run; returns their number."""
    taken = 0
    for name in STUDIES:
        for scale in SCALES:
            folder = runs / f"{name.replace('/', '-')}-{scale}"
            if (folder / RESULTS).is_file() and (results := Results.load(folder)).cells:
                (path := home / record_path(name, scale)).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, record_text(results).encode())
                taken += 1
    return taken


def with_block(path: Path, block: str) -> str:
    """The text of a file with another block between its marks."""
    head, _, others = path.read_text(encoding="utf-8").partition(BEGIN)
    _, ended, tail = others.partition(END)
    if not ended:
        raise SystemExit(f"{path.name}: no block between {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


def paper_text(paper: str, own: Sequence[StudyRecord]) -> str:
    """The page of a folder below papers/."""
    common, known = PAPERS / paper / "common.yaml", verdicts.by_name(own)
    small = study_content(common)["description"] if common.is_file() else "Our own questions."
    of_board = boards.all_boards(own) if paper == "polyfed" else {}
    own = sorted(own, key=lambda record: [*of_board, record.name].index(record.name))  # the boards first
    more = {
        "twins": _twins(own),
        "shown": _shown(own),
        "sentences": verdicts.sentences(paper, known, queue()) if paper in CLAIMED else {},
        "claims": {one.path: verdicts.claim_lines(one, known) for one in own},
        "tables": {one.path: boards.board_table(one) if one.name in of_board else one.table for one in own},
        "boards_left": [one for name, one in of_board.items() if name not in known],
        "left_text": boards.left_text,
        "rules": boards.RULES,
        "enter": boards.ENTER,
    }
    return _rendered("paper.md.j2", paper=paper, name=NAMES[paper], small=small, records=own, **more)


def queue() -> verdicts.Queue:
    """Cells and CPU hours that the queue of evidence has left, by study."""
    return {name: (count, hours) for name, count, _, hours in evidence.plan_table()}


def _twins(own: Sequence[StudyRecord]) -> dict[str, str]:
    """Study -> heading of an earlier one on its page that has the same runs and figures."""
    first: dict[str, str] = {}  # runs and figures -> heading
    same = {one.name: first.setdefault(_figures(one.results), one.heading) for one in own}
    return {name: title for (name, title), one in zip(same.items(), own, strict=True) if title != one.heading}


def _shown(own: Sequence[StudyRecord]) -> dict[str, list[Picture]]:
    """Record -> figures on its page: none of a twin."""
    twins = _twins(own)
    return {record.path: [] if record.name in twins else record.pictures for record in own}


def _figures(results: Results) -> str:
    content = results.to_json()
    return json.dumps([content["cells"], content["figures"]])


def ledger_text(recorded: Sequence[StudyRecord]) -> str:
    """All studies: their runs, their claims, and the cells that the queue of evidence has left."""
    by_place = {(record.name, record.scale): record for record in recorded}
    lines: dict[str, list[list[str]]] = {paper: [] for paper in NAMES}
    left = queue()
    studies = {name: Study.load(file) for name, file in STUDIES.items()}
    for name, study in sorted(studies.items(), key=lambda item: place(item[1])):
        known = [record for scale in SCALES if (record := by_place.get((name, scale)))]
        entries = [[one.heading, str(one.runs), one.state] for one in known]
        paper, _, item = name.partition("/")
        count, hours = left[name]
        queued = f"{count} cells, {hours:.1f} h" if count else ""
        lines[paper] += [
            [item, *line, queued] for line in entries or [[heading(study), f"(≤ {cells(study)})", "not run"]]
        ]
    heads = ("study", "what", "runs", "claims", "queued")
    tables = {paper: Markup(table(heads, *own, ruler="-")) for paper, own in lines.items()}
    counts = counted(recorded)
    settings = {paper: of_settings(own) for paper, own in counts.items()}
    claims = {paper: decided([one for one in recorded if one.name.startswith(f"{paper}/")]) for paper in NAMES}
    hours = {paper: sum(own for name, (_, own) in left.items() if name.startswith(f"{paper}/")) for paper in NAMES}
    what = {"counts": counts, "of_settings": settings, "decided": claims, "outcomes": OUTCOMES, "hours": hours}
    main = verdicts.main_lines(verdicts.by_name(recorded), left, NAMES)
    what["main"] = Markup(table(verdicts.MAIN_HEADS, *main, ruler="-"))
    what |= {"items": verdicts.items(recorded, left, NAMES), "before": verdicts.BEFORE}
    what["at_paper_scale"] = any(one.scale != SMALL for one in recorded)
    what["judged"] = [
        sum(counts[paper][name] for paper in CLAIMED for name in names) for names in (OUTCOMES[:2], OUTCOMES)
    ]
    return _rendered("ledger.md.j2", names=NAMES, tables=tables, **what)


def decided(own: Sequence[StudyRecord]) -> list[str]:
    """Claims on a method or a part that are decided, as ``**above** a > b on r1 (Table 1)``."""
    claims, known = dict[Any, str](), verdicts.by_name(own)
    for record in own:
        item = record.study.source.item if record.study.source else record.name.partition("/")[2]
        for one in record.judgements:
            if outcome(one) in ("seen", "not seen here") and one.claim.kind != "setting":
                costs = markdown(verdicts.costs_text(record, one.claim, known))
                text = f"{markdown(one.claim.text)} ({item}): **{one.in_words}**{costs and f' ({costs})'}"
                claims.setdefault(record.compared(one.claim), text)
    return list(claims.values())


def counted(recorded: Sequence[StudyRecord]) -> dict[str, Counter[str]]:
    """Folder below papers/ -> outcome -> claims of the paper's items about its method or a part; on settings apart.

    Claims that compare the same runs in the same column count once, at the first item; what no item has is polyfed's.
    """
    counts: dict[str, Counter[str]] = {paper: Counter() for paper in NAMES}
    known = set()
    for record in recorded:
        paper = record.name.partition("/")[0] if record.study.source else "polyfed"
        for item in record.judgements:
            if item.sample is not None and (compared := record.compared(item.claim)) not in known:
                known.add(compared)
                counts[paper][f"setting {outcome(item)}" if item.claim.kind == "setting" else outcome(item)] += 1
    return counts


def of_settings(counts: Mapping[str, int]) -> str:
    """``2 of 5 seen``; empty without such a claim."""
    total = sum(counts[f"setting {name}"] for name in OUTCOMES)
    return f"{counts['setting seen']} of {total} seen" if total else ""


def gains_table(record: StudyRecord, column: str) -> str:
    """All rows of a study, the best first, each minus the reference, with the verdict where a claim is on just that."""
    results, (point,) = record.results, record.study.points
    lines = [f"||{column}|minus {results.reference}|verdict|", "|-|-:|-:|-|"]
    run = [row for row in record.study.rows if results.at(row, point, column)]
    for row in sorted(run, key=lambda row: -results.spread(row, point, column).mean):
        spread = results.spread(row, point, column)
        comparison, verdict = (
            (None, "") if row == results.reference else record.results.against(row, results.reference, point, column)
        )
        minus = "" if comparison is None else comparison_text(comparison)
        lines.append(f"|{markdown(f'{row}{record.mark(row)}')}|{spread.mean:.1f} ± {spread.std:.1f}|{minus}|{verdict}|")
    left = ", ".join(row for row in record.study.rows if row not in run)
    return "\n".join([*lines, *(["", f"Not run yet: {markdown(left)}."] if left else [])]) + "\n"


def blocks(recorded: Sequence[StudyRecord]) -> dict[str, str]:
    """File -> text between its marks."""
    counts = counted(recorded)
    texts = {"headline": boards.headline(recorded), "lacking": ", ".join(boards.lacking(recorded))}
    texts |= {"short_table": boards.short_table(recorded), "gap": (ROOT / gap_picture.FILE).is_file()}
    texts |= {"speed": speed_sentence(_measurements()), "gpu": gpu_sentence(_measurements())}
    made = {"README.md": _rendered("readme.md.j2", **texts)}
    for paper in CLAIMED:
        outcomes = (
            ", ".join(f"{counts[paper][name]} {name}" for name in OUTCOMES if counts[paper][name]) or "none was run"
        )
        studies = f"[studies that were run](../../papers/{paper}/README.md)"
        others = f"; on settings, which no method decides: {of}" if (of := of_settings(counts[paper])) else ""
        known = verdicts.by_name(recorded)
        made[f"docs/explanation/{paper}.md"] = (
            f"**What came out**: {verdicts.outcome_text(paper, known, queue())}\n\n"
            f"**Why**: {verdicts.why_text(paper, known, queue())}\n\n"
            + (f"{best}\n\n" if (best := verdicts.best_text(paper, known)) else "")
            + f"Claims on the method and its parts, of the {studies}: {outcomes}{others}.\n"
            + "".join(_parts_text(record) for record in recorded if record.name == f"{paper}/parts")
        )
    return made | {
        which_method.PAGE: which_method.tree_text(recorded),
        which_method.TABLES: which_method.tables_text(recorded),
        SPEED: f"{speed_text(_measurements())}\n",
    }


def _parts_text(record: StudyRecord) -> str:
    """Gains by part of a method, below the counts."""
    page = f"[{record.file}](../../papers/{record.name.partition('/')[0]}/README.md#{record.anchor})"
    return f"\nBy part ({page}):\n\n{gains_table(record, record.main_columns[0])}"


def speed_text(record: Mapping[str, Any]) -> str:
    """Figures of all benchmarks, and limits that are not met."""
    tables: dict[str, list[str]] = {}
    for each in record["benchmarks"]:
        lines = tables.setdefault(
            _where(each), ["| by | what | measured | limit | against |", "|---|---|---:|---:|---|"]
        )
        name = f"`{each['benchmark'].split()[0]}.py`"
        lines += [f"| {name} | {_figure(figure)} |" for figure in each["figures"]]
        lines += [f"| {name} | **failed** | | | |"] if each["failed"] else []
        lines += [f"| {name} | not run: lacks {each['lacks']} | | | |"] if each["lacks"] else []
    run = {each["benchmark"].split()[0] for each in record["benchmarks"]}
    left = [name for name in dict.fromkeys(command.split()[0] for command in record["plan"]) if name not in run]
    notes = [f"**Not run** for these tables: {', '.join(f'`{name}.py`' for name in left)}."] if left else []
    notes += [f"![{COST_CAPTION}](../images/{Path(COST).name})"] if by_clients(record) else []
    return "\n\n".join([*("\n\n".join([where, "\n".join(rows)]) for where, rows in tables.items()), *notes])


def speed_sentence(record: Mapping[str, Any]) -> str:
    """Cost of a small client next to another library, as far as it was measured."""
    figures = [f for each in record["benchmarks"] if AHEAD_OF in each["benchmark"] for f in each["figures"]]
    of = re.compile(r"FedAvg, perceptron, ([\d,]+) clients: (polyfed|pfl_research)")
    named = [(match, figure["ratio"]) for figure in figures if (match := of.fullmatch(figure["name"]))]
    own, other = ([f"{ratio:.2f}" for match, ratio in named if match[2] == name] for name in ("polyfed", AHEAD_OF))
    if not own or not other:
        return ""
    clients = dict.fromkeys(match[1] for match, _ in named)
    return (
        f"With messages, checks, ledger and checkpoints, a round of {' and '.join(clients)} small clients takes "
        f"{' and '.join(own)} times the CPU time of a plain PyTorch loop; pfl-research takes {' and '.join(other)} "
        f"([speed]({SPEED}))."
    )


def gpu_sentence(record: Mapping[str, Any]) -> str:
    """Cost of FedAvg's rounds on a GPU next to a plain loop, if it was measured."""
    of = re.compile(r"FedAvg, ([\d.]+) M weights, .*images per second: a round")
    own = [(each, figure) for each in record["benchmarks"] if "gpu" in each["machine"] for figure in each["figures"]]
    ratios = {f"{figure['ratio']:.2f}": each for each, figure in own if of.fullmatch(figure["name"])}
    if not ratios:
        return ""
    gpu = next(iter(ratios.values()))["machine"]["gpu"]
    least, most = min(ratios, key=float), max(ratios, key=float)
    times = f"{least} to {most} times the time of a plain PyTorch loop"
    return f"On one {gpu} a round of FedAvg takes {times} ([speed]({SPEED}))."


def _where(each: Mapping[str, Any]) -> str:
    """Commit, date and machine of a benchmark."""
    of = each["machine"]
    gpu = f", {of['gpu']}" if "gpu" in of else ""
    return (
        f"Commit {each['commit']}, {each['date']}, one thread; {of['cores']} cores ({of['system']}, "
        f"{of['processor']}){gpu}, Python {of['python']}, torch {of['torch']}."
    )


def _figure(figure: Mapping[str, Any]) -> str:
    measured = f"{figure['ratio']:g} {figure['unit']}".strip()
    measured = f"**{measured}, not met**" if figure["within"] is False else measured
    sign = "≤" if figure["better"] == "smaller" else "≥"
    limit = "" if figure["limit"] is None else f"{sign} {figure['limit']:g}"
    return f"{figure['name']} | {measured} | {limit} | {figure['against']}"


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Path of each page -> its text."""
    recorded = standing(root / PAPERS.name)
    own = _by_paper(recorded)
    papers = {paper: paper_text(paper, own.get(paper, [])) for paper in NAMES}
    return {
        **{root / PAPERS.name / paper / "README.md": text for paper, text in papers.items()},
        root / PAPERS.name / "README.md": ledger_text(recorded),
        root / PAPERS.name / boards.FILE: boards.boards_text(recorded),
        **{root / name: with_block(root / name, block) for name, block in blocks(recorded).items()},
    }


def pictures(root: Path = ROOT) -> dict[Path, Callable[[], str]]:
    """Path of each figure -> function that draws its SVG; another matplotlib may place texts otherwise."""
    recorded, drawn = standing(root / PAPERS.name), dict[Path, Callable[[], str]]()
    for paper, own in _by_paper(recorded).items():
        for record in own:
            for picture in _shown(own)[record.path]:
                drawn[root / PAPERS.name / paper / record.picture_file(picture)] = partial(_svg, picture)
    if points := by_clients(_measurements()):
        drawn[root / COST] = partial(_svg, Picture("clients", COST_CAPTION, partial(draw_clients, points)))
    panels = gap_picture.closed(recorded)
    gap = Picture("gap", gap_picture.gap_sentence(panels), partial(gap_picture.draw_gap, panels))
    return drawn | {root / gap_picture.FILE: partial(_svg, gap)}


def _measurements() -> dict[str, Any]:
    """Record of `make bench`."""
    record: dict[str, Any] = json.loads((ROOT / BENCHMARKS).read_text(encoding="utf-8"))
    return record


def by_clients(record: Mapping[str, Any]) -> dict[str, list[tuple[int, float, float]]]:
    """CPU time and memory of polyfed over those of a plain loop: number of clients, ratio, limit."""
    figures = [figure for each in record["benchmarks"] if "10000" in each["benchmark"] for figure in each["figures"]]
    points: dict[str, list[tuple[int, float, float]]] = {}
    for figure in figures:
        if match := re.fullmatch(r"FedAvg, perceptron, ([\d,]+) clients: (memory of )?polyfed", figure["name"]):
            what = "peak memory" if match[2] else "CPU time of a round"
            points.setdefault(what, []).append((int(match[1].replace(",", "")), figure["ratio"], figure["limit"]))
    return points


@styled
def draw_clients(points: Mapping[str, Sequence[tuple[int, float, float]]]) -> Figure:
    """``by_clients`` as a figure."""
    figure, axes = figure_grid(1, len(points), width=3.6, height=2.8)
    for ax, (title, own) in zip(axes, points.items(), strict=True):
        clients, ratios, limits = zip(*own, strict=True)
        ax.plot(clients, ratios, "o-", color=COLOURS[0])
        ax.plot(clients, limits, "--", color=GREY)
        ax.set(xscale="log", ylim=(0, None), title=title, xlabel="clients", ylabel="times a plain loop's")
        ax.set_xticks(clients, [f"{count:,}" for count in clients])
        ax.minorticks_off()
    return figure


# the colours of a report, which are others in dark mode
THEME = re.sub(r"\s+", " ", resource("style.css").partition("* {")[0]).strip()
_FONTS = "DejaVu Sans, Verdana, Arial, sans-serif"


def _svg(picture: Picture) -> str:
    """SVG without its ballast: spaces, invisible digits, and one list of fonts for each text."""
    text = svg_text(picture.draw(), picture.sentence or picture.name)
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), text)
    text = re.sub(r' transform="rotate\(-0 [^"]*\)"|<g id="[^"]*"/>', "", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = text.replace("<svg ", f'<svg font-family="{_FONTS}" ', 1)
    text = text.replace(">", f"><style>{THEME}</style>", 1)
    return re.sub(r"\s*\n\s*", "\n", text)


def _by_paper(recorded: Sequence[StudyRecord]) -> dict[str, list[StudyRecord]]:
    return {paper: [*own] for paper, own in groupby(recorded, key=lambda record: record.name.partition("/")[0])}


def _rendered(template: str, **content: Any) -> str:
    return markdown_templates(TEMPLATES).get_template(template).render(**content)


def main() -> int:
    """Write all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="home", type=Path, help="folder of studies that were run")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    if options.home is not None and not take_over(options.home):
        raise SystemExit(f"--from {options.home}: no study of papers/ was run there")
    if not options.check:
        drawn = pictures()
        for left in {*PAPERS.rglob("*.svg"), *ROOT.glob(COST)} - {*drawn}:
            left.unlink()  # of a study that is not shown any more
        for path, text in {**pages(), **{path: draw() for path, draw in drawn.items()}}.items():
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, text.encode())
            print(f"written: {path.relative_to(ROOT)}")
    contradictions = faults()
    print(*contradictions, sep="\n", file=sys.stderr)
    return 1 if contradictions else 0


if __name__ == "__main__":
    sys.exit(main())
