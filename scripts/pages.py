"""Pages of results from records of studies: docs/results/, the block in docs/results.md, and docs/reproduction.md.

    python scripts/pages.py                        # from the records in docs/results
    python scripts/pages.py --from runs/studies    # take over what was run of polyfed's own studies before

A record is ``study.yaml`` and ``results.json`` of a study's folder. Equal records give equal bytes, and a test compares
pages with records, so that no page is edited by hand.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from polyfed.core.files import write_atomically
from polyfed.lab.studies.ledger import ledger, ledger_text
from polyfed.lab.studies.records import StudyRecord, index_text, record_text, records
from polyfed.lab.studies.results import RESULTS, STUDY
from polyfed.lab.studies.study_files import folder_name

DOCS = Path(__file__).resolve().parents[1] / "docs"
HOME = "results"
BEGIN, END = "<!-- made by: make pages -->\n", "<!-- end of what make pages makes -->\n"


def take_over(found: Iterable[StudyRecord], home: Path, docs: Path = DOCS) -> None:
    """Copy the records of studies that were run."""
    for record in found:
        folder = docs / HOME / folder_name(record.name, record.scale)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (STUDY, RESULTS):
            shutil.copy(home / folder.name / name, folder / name)


def pages(docs: Path = DOCS) -> dict[Path, str]:
    """Path of each page -> its text."""
    home = docs / HOME
    found = records(home)
    head, _, rest = (docs / "results.md").read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise SystemExit(f"docs/results.md: no block between {BEGIN.strip()!r} and {END.strip()!r}")
    return {
        **{home / record.page: record_text(record) for record in found},
        docs / "results.md": f"{head}{BEGIN}\n{index_text(found, HOME)}\n{END}{tail}",
        docs / "reproduction.md": ledger_text(ledger(home), is_brief=True),
    }


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
    for path, text in pages().items():
        write_atomically(path, text.encode())
        print(f"written: {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
