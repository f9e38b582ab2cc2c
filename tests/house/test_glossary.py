"""Each noun of the public API is explained on the page of concepts, once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import polyfed
from polyfed.algorithms import algorithm
from polyfed.algorithms.algorithm import Algorithm, Client, Cohort, Reply, Server

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "concepts.md"
_OTHERS = (
    "a accept accepted add an assess autocast averaged awaited be begin by changed compare count counts declares "
    "distinct drop each evaluate exchanged export fit for from has have heard home idle if initial is judged "
    "late learn learns learnt load local may need needs new num of open own personal plot polyfed prepare public "
    "received register release represent require restore resume secure sends share shares snapshot steps summed takes "
    "train trained update version warn without"
)
OTHERS = frozenset(_OTHERS.split())
"""Verbs, adjectives and particles of names."""
ENDINGS = {"ies": "y", "sses": "ss", "ches": "ch", "ss": "ss", "s": ""}
"""Ending of a plural -> ending of its singular."""


def singular(word: str) -> str:
    ending = next((one for one in ENDINGS if word.endswith(one)), "")
    return word.removesuffix(ending) + ENDINGS.get(ending, "")


def public_names() -> set[str]:
    """Names that users and authors of methods write."""
    names = {*polyfed.__all__, *algorithm.__all__} - {"__version__"}
    for one in (Server, Client, Cohort, Reply, Algorithm):
        own = vars(one) if one is Algorithm else dir(one)
        fields = getattr(one, "__dataclass_fields__", {})
        names |= {name for name in (*own, *fields) if not name.startswith(("_", "model_"))}
    return names


def words(name: str) -> set[str]:
    return {singular(part.lower()) for part in re.findall(r"[A-Z]?[a-z]+", name) if part.lower() not in OTHERS}


def test_each_noun_of_the_public_api_stands_on_the_page_of_concepts_once() -> None:
    bold = re.findall(r"\*\*([^*]+)\*\*", PAGE.read_text(encoding="utf-8"))
    explained = Counter(singular(word.lower()) for term in bold for word in term.split())
    assert sorted(set[str]().union(*map(words, public_names())) - explained.keys()) == []
    assert [term for term, count in Counter(map(str.lower, bold)).items() if count > 1] == []
