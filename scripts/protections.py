"""What leaves, as two pages say it: the table of methods with what may protect it, and what a site tells at joining.

    python scripts/protections.py    # write it

A test compares the pages with what this makes, and the table with the steps that methods declare.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any, cast

from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.errors import ConfigError
from polyfed.core.files import write_atomically
from polyfed.core.settings import Settings
from polyfed.federation.client import ClientInfo
from polyfed.privacy.policy import Policy, SentField
from polyfed.privacy.settings import AggregationSettings, PrivacySettings, require_covered
from polyfed.runs.config_files import merged
from polyfed.runs.conflicts import Choice, conflicts
from polyfed.wire.payload import Logits, Representations, TensorBundle, Weights
from polyfed.wire.schema import steps_of
from reference import code, table

_DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = _DOCS / "explanation" / "what-leaves-a-site.md"
PAGES = (PAGE, _DOCS / "how-to" / "medical-consortium.md")
BEGIN = "<!-- made by: python scripts/protections.py -->\n"
END = "<!-- end of what scripts/protections.py makes -->"
JOINING = ("<!-- joining, by scripts/protections.py -->", "<!-- end of joining -->")
HEADS = ("method", "leaves in each round", "masked sums", "noise on replies", "noise in training", "robust rules")
WORDS: dict[type[TensorBundle], str] = {
    Weights: "weights",
    Representations: "representations",
    Logits: "class scores",
}
"""Kind of tensors -> what the page calls it."""
_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("teacher.weights", "count"),
    ("public.form", "scores"),
)
"""Settings that let a protection work where the default does not."""
_REPLY = PrivacySettings.model_validate(
    {
        "metrics": "clear",
        "reply": {"noise_multiplier": 1.0} | dict.fromkeys(("weights", "representations", "logits"), 1.0),
    }
)
_SAMPLES = PrivacySettings.model_validate({"metrics": "clear", "samples": {"noise_multiplier": 1.0}})


def methods() -> dict[str, type[Algorithm]]:
    """Every method that sites can take part in, by name."""
    kinds = cast("dict[str, type[Algorithm]]", Algorithm.available())
    return {name: kind for name, kind in sorted(kinds.items()) if kind.asks_clients}


def rows() -> Iterator[tuple[str, ...]]:
    """A line for each method."""
    for name, kind in methods().items():
        obstacles = (_against_sums, _against_noise_on_replies, _against_noise_in_training, _against_rules)
        yield code(name), leaving(kind), *(_answer(kind, against) for against in obstacles)


def leaving(kind: type[Algorithm]) -> str:
    """What clients of a method send in steps of training, in the page's words."""
    fields = [sent for sent in Policy(kind).fields if sent.step_kind == "step"]
    said = [_words(sent) for sent in fields]
    return ", ".join(dict.fromkeys(said)) or "nothing"


def _words(sent: SentField) -> str:
    if not sent.field:
        return "losses"
    if not sent.tensors:
        return "number of samples" if sent.field == "num_examples" else f"`{sent.field}`"
    kinds = " or ".join(WORDS[kind] for kind in sent.tensors)
    return f"{kinds} (`{sent.field}`)" if sent.field not in ("weights", "representations", "knowledge") else kinds


Against = Callable[[Algorithm], str]


def _against_sums(method: Algorithm) -> str:
    return next(conflicts(Choice(method, AggregationSettings(secure="pairwise_masks"))), "")


def _against_noise_on_replies(method: Algorithm) -> str:
    return _refusal(lambda: require_covered(_REPLY, steps_of(method), method.component_name()))


def _against_noise_in_training(method: Algorithm) -> str:
    against = next(conflicts(Choice(method, privacy=_SAMPLES)), "")
    return against or _refusal(lambda: require_covered(_SAMPLES, steps_of(method), method.component_name()))


def _against_rules(method: Algorithm) -> str:
    return next(conflicts(Choice(method, AggregationSettings(robust="median"))), "")


def _refusal(check: Callable[[], None]) -> str:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return ""


def _answer(kind: type[Algorithm], against: Against) -> str:
    """Yes, no, or with which settings."""
    if leaving(kind) == "nothing":
        return ""
    known = [(key, value) for key, value in _SETTINGS if _has(kind, key)]
    for number in range(len(known) + 1):
        for chosen in combinations(known, number):
            try:
                method = kind.model_validate(reduce(merged, [{}, *(_at(key, value) for key, value in chosen)]))
            except ValueError:  # they have no effect beside each other
                continue
            if not against(method):
                shown = ", ".join(f"{key}: {'null' if value is None else value}" for key, value in chosen)
                return f"with {code(shown)}" if chosen else "yes"
    return "no"


def _has(kind: type[Algorithm], key: str) -> bool:
    section, _, name = key.rpartition(".")
    part = kind.model_fields[section].default if section in kind.model_fields else None
    return name in (type(part).model_fields if isinstance(part, Settings) else {} if section else kind.model_fields)


def _at(key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


def joining() -> str:
    """What a site tells of a client at joining."""
    return ", ".join(f"**{words}**" if name == "samples" else words for name, words in ClientInfo.told().items())


def page(path: Path = PAGE) -> str:
    """A page, with the table and the sentence as the code has them.

    Raises:
        SystemExit: the page has no place for one.
    """
    text = _filled(path, path.read_text(encoding="utf-8"), *JOINING, joining())
    return text if path != PAGE else _filled(path, text, BEGIN, END, "\n" + "\n".join(table(HEADS, rows())) + "\n\n")


def _filled(path: Path, text: str, begin: str, end: str, made: str) -> str:
    head, begun, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not begun or not ended:
        raise SystemExit(f"{path}: no block between {begin.strip()!r} and {end.strip()!r}")
    return f"{head}{begin}{made}{end}{tail}"


if __name__ == "__main__":
    for path in PAGES:
        write_atomically(path, page(path).encode())
    sys.exit(0)
