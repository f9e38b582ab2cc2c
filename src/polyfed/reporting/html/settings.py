"""The resolved configuration, and what a reader must know to judge the figures."""

from __future__ import annotations

import yaml

from polyfed.reporting.html.cells import folded
from polyfed.reporting.html.markup import Markup, tag
from polyfed.runs.records import RunRecords

_EXPLAINED = {
    "Recall at K (R@K)": "The share of queries, in percent, that find one of their positives among the first K of the "
    "gallery. The larger the gallery, the harder: compare no recalls of different galleries or folds.",
    "Ties": "Ties count against the model: where several entries score the same, the positive is taken to stand last.",
    "Chance": "What a random order of the same gallery reaches, drawn without replacement and with the positives each "
    "query has; for accuracy a uniform guess among the classes. With uneven classes, always naming the most frequent "
    "one may beat that.",
    "Final and best": "Final is the last evaluation. Best is the highest over all rounds of the very metric shown, so "
    "it leans upwards: choose rounds by validation, then read the test figure.",
    "Means of clients": "Each client counts once, with its own latest evaluation, whatever the number of its samples. "
    "The band goes from the lowest to the highest client; it is no confidence interval.",
    "One run": "A page shows one run with one seed. Differences between methods need several seeds: polyfed compare.",
    "Bytes": "Sizes of the messages as encoded: tensors with their framing. Layers below (TLS, HTTP) add to it.",
    "Weights": "How much each client counted in the aggregate of each public sample; with equal weights each line "
    "would lie on the dotted one.",
}


def configuration(records: RunRecords) -> Markup:
    """The configuration as YAML; nothing if it was not written."""
    if not records.config:
        return Markup()
    text = yaml.safe_dump(dict(records.config), sort_keys=False, allow_unicode=True, width=100)
    note = tag(
        "p", "Every setting, defaults included. polyfed run on this file does the same run again.", class_="note"
    )
    return Markup(note + folded("config.yaml", tag("pre", tag("code", text), tabindex="0")))


def explanation() -> Markup:
    """How to read the figures."""
    return tag("dl", [(tag("dt", term), tag("dd", text)) for term, text in _EXPLAINED.items()], class_="terms")
