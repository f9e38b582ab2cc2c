"""Generated parts of two pages: the table of methods with their replies and protections, and the facts of joining.

    python scripts/protections.py    # write it

A test compares the pages with what this makes, and the table with the steps that methods declare.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.errors import ConfigError
from polyfed.core.files import write_atomically
from polyfed.federation.client import ClientInfo
from polyfed.privacy.policy import Policy, SentField
from polyfed.privacy.settings import AggregationSettings, PrivacySettings, require_covered
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
WORDS: dict[type[TensorBundle], str] = {Weights: "weights", Representations: "representations", Logits: "class scores"}
"""Bundle of tensors -> its name on the page."""
_CHOICES: dict[str, dict[str, Any]] = {"": {}, "teacher.weights: count": {"teacher": {"weights": "count"}}}
"""Settings that enable a protection where the default does not."""
_REPLY = PrivacySettings.model_validate(
    {
        "metrics": "clear",
        "reply": {"noise_multiplier": 1.0} | dict.fromkeys(("weights", "representations", "logits"), 1.0),
    }
)
_SAMPLES = PrivacySettings.model_validate({"metrics": "clear", "samples": {"noise_multiplier": 1.0}})


def methods() -> dict[str, type[Algorithm]]:
    """Every method that sites can take part in, by name."""
    classes = cast("dict[str, type[Algorithm]]", Algorithm.available())
    return {name: method_class for name, method_class in sorted(classes.items()) if method_class.asks_clients}


def rows() -> Iterator[tuple[str, ...]]:
    """A line for each method."""
    for name, method_class in methods().items():
        obstacles = (_against_sums, _against_noise_on_replies, _against_noise_in_training, _against_rules)
        yield code(name), leaving(method_class), *(_answer(method_class, against) for against in obstacles)


def leaving(method_class: type[Algorithm]) -> str:
    """Replies of a method's clients in steps of training, in the page's words."""
    fields = [sent for sent in Policy(method_class).fields if sent.step_kind == "step"]
    return ", ".join(dict.fromkeys(map(_words, fields))) or "nothing"


def _words(sent: SentField) -> str:
    if not sent.field:
        return "losses"
    if not sent.tensors:
        return "number of samples" if sent.field == "num_examples" else f"`{sent.field}`"
    bundles = " or ".join(WORDS[bundle] for bundle in sent.tensors)
    return f"{bundles} (`{sent.field}`)" if sent.field not in ("weights", "representations", "knowledge") else bundles


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


def _answer(method_class: type[Algorithm], against: Against) -> str:
    """Yes, no, or the settings that it takes."""
    if leaving(method_class) == "nothing":
        return ""
    for shown, settings in _CHOICES.items():
        try:
            method = method_class.model_validate(settings)
        except ValueError:  # the method lacks them, or they have no effect together
            continue
        if not against(method):
            return f"with {code(shown)}" if shown else "yes"
    return "no"


def joining() -> str:
    """Facts of a client that its site sends at joining."""
    return ", ".join(f"**{words}**" if name == "samples" else words for name, words in ClientInfo.labels().items())


def page(path: Path = PAGE) -> str:
    """A page, with the table and the sentence as the code has them.

    Raises:
        SystemExit: the page has no place for one.
    """
    text = _filled(path, path.read_text(encoding="utf-8"), *JOINING, joining())
    return text if path != PAGE else _filled(path, text, BEGIN, END, "\n" + "\n".join(table(HEADS, rows())) + "\n\n")


def _filled(path: Path, text: str, begin: str, end: str, made: str) -> str:
    head, begun, after = text.partition(begin)
    _, ended, tail = after.partition(end)
    if not begun or not ended:
        raise SystemExit(f"{path}: no block between {begin.strip()!r} and {end.strip()!r}")
    return f"{head}{begin}{made}{end}{tail}"


if __name__ == "__main__":
    for path in PAGES:
        write_atomically(path, page(path).encode())
    sys.exit(0)
