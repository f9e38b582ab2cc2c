"""Sections of radiology reports."""

from __future__ import annotations

import pytest

from polyfed.data.sources.mimic_cxr import section_text


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ("FINDINGS: clear.\nIMPRESSION: normal.", "clear. normal."),
        ("IMPRESSION: normal.\nFINDINGS: clear.", "normal. clear."),
        ("  Findings: clear.\n\n  Impression: normal.", "clear. normal."),
        ("INDICATION: cough\nFINDINGS AND IMPRESSION:\nclear\nRECOMMENDATION(S): none", "clear"),
        ("FINDINGS/IMPRESSION: clear\nNOTIFICATION: Dr. ___ at 5:37", "clear"),
        ("FINDING: clear\nLUNGS: dry\nHEART: small\nCOMPARISON: none\n", "clear LUNGS: dry HEART: small"),
        ("IMPRESSION: a\nADDENDUM:  later\nIMPRESSION: b", "a b"),
        ("IMPRESSION: x\nAP CHEST, 5:37 A.M.: moved\nFindings were discussed with the team: yes", None),
        ("FINAL REPORT\n Portable chest:\n no change", "whole Portable chest: no change"),
        ("FINAL REPORT\nFINDINGS:\n\nIMPRESSION:\n", "whole FINDINGS: IMPRESSION:"),
        ("INDICATION: see IMPRESSION: below", "whole INDICATION: see IMPRESSION: below"),
        ("", ""),
        (" \n FINAL REPORT \n", ""),
    ],
)
def test_sections_are_found_by_their_headings(report: str, expected: str | None) -> None:
    wanted = ("findings", "impression")
    if expected is None:
        assert section_text(report, wanted) == "x AP CHEST, 5:37 A.M.: moved Findings were discussed with the team: yes"
        return
    none = not expected or expected.startswith("whole ")
    assert section_text(report, wanted, "none") == (None if none else expected)
    assert section_text(report, wanted) == (expected.removeprefix("whole ") or None)


def test_a_section_may_have_any_name() -> None:
    report = "REASON FOR EXAM: fall\nLUNGS AND PLEURA: dry\nHEART: small\nIMPRESSION: normal"
    assert section_text(report, ["reason"]) == "fall LUNGS AND PLEURA: dry HEART: small"
    assert section_text(report, ["Pleura", "heart"]) == "dry small"
