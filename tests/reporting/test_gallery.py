"""The page of what is retrieved before and after a federation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyfed import Experiment, open_run, run
from polyfed.core.errors import RunError
from polyfed.reporting.gallery import Retrieval, Shelf, Viewer, judged_samples, shelf_of, thumbnail, write_gallery
from polyfed.reporting.markup import GalleryEntry
from polyfed.reporting.page import html_report
from small_federations import Config


def hits(page: str, when: str) -> list[str]:
    return re.findall(rf'<div class="hits" data-when="{when}">(.*?)</div>', page, re.DOTALL)


@pytest.fixture(scope="module")
def page(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("gallery") / "gallery.html"
    return write_gallery(open_run(tiny_run), out, queries=2, k=3).read_text()


def test_it_shows_images_and_captions_before_and_after(page: str) -> None:
    # texts asked of server and a paired client; images of these and of the image client
    for when in ("before", "after"):
        rows = hits(page, when)
        assert len(rows) == 2 * 2 + 2 * 3
        # three, and the right one behind them where it is not among these
        assert all(row.count("<figure") - row.count(">right, place ") == 3 for row in rows)
    assert page.count("<h3>image</h3>") == 2
    assert "<h3>paired-0</h3>" in page
    assert "paired-1" not in page


def test_texts_run_in_their_own_direction_and_badges_stay_within_their_cards(page: str) -> None:
    assert page.count('<p dir="auto">') > 2 * 2 * 3
    assert re.search(r"\.hit \.pill \{ white-space: normal;.* max-width: 100%", page)


def test_it_is_marked_as_local_and_loads_nothing(page: str) -> None:
    assert "not to\nleave the place where these data may be" in page
    assert set(re.findall(r'(?:src|href)="([^"#][^:"]*):', page)) == {"data"}
    assert "default-src &#39;none&#39;" in page


def test_of_one_modality_it_shows_the_nearest_and_no_table_of_right_answers(
    classifier_run: Path, tmp_path: Path
) -> None:
    page = write_gallery(open_run(classifier_run), tmp_path / "g.html", queries=2, k=3).read_text()
    assert (page.count("<h3>server</h3>"), page.count("<h3>image</h3>"), "<table>" in page) == (2, 2, False)
    assert [row.count("<figure") for when in ("before", "after") for row in hits(page, when)] == [3] * 8


def test_what_is_shown_is_what_the_models_give(tiny_run: Path) -> None:
    opened = open_run(tiny_run)
    split = opened.federation.data.split("scenes", "test")
    pictures = [value["bytes"] for value in split.modality("image").values.to_pylist()]
    column = split.modality("text")
    captions = column.texts()
    items = np.repeat(np.arange(len(pictures)), len(captions) // len(pictures)) if column.nested else np.arange(12)
    context = opened.federation.data.context
    shelves = {modality: shelf_of(split, modality, 12, context) for modality in ("image", "text")}
    np.testing.assert_array_equal(shelves["text"].items, items)
    viewer, after = Viewer.of(opened, "server"), opened.model
    retrieval = Retrieval(viewer, shelves, 4)
    for when, model in (("before", viewer.before), ("after", after)):
        result = retrieval.retrieved(when, "text", "image", 5)
        expected = model.search(captions[5], pictures, k=4)
        assert [entry.image for entry in result[:4]] == [thumbnail(pictures[hit.position]) for hit in expected]
        assert [entry.right for entry in result[:4]] == [items[5] == hit.position for hit in expected]
        for query, text in enumerate(captions):
            positions = {hit.position: rank for rank, hit in enumerate(model.search(text, pictures, k=12), 1)}
            late = [entry.late for entry in retrieval.retrieved(when, "text", "image", query) if entry.late]
            assert late == ([positions[int(items[query])]] if positions[int(items[query])] > 4 else [])
    first = np.argsort(-after.similarity(pictures, captions).T, axis=1, kind="stable")[:, :4]
    share = 100 * np.mean([(first[row] == items[row]).any() for row in range(len(captions))])
    row = next(retrieval.summary())
    assert (row["participant"], row["direction"]) == ("server", "text to image")
    assert row["after"] == pytest.approx(share, abs=0.06)


def test_before_is_before_any_training(tiny: Config, tmp_path: Path) -> None:
    tiny["run"] |= {"rounds": 1, "output": {"plots": False, "keep_rounds": [0]}}
    opened = run(Experiment.load(tiny), tmp_path / "run")
    texts = ["a red square", "a blue circle"]
    kept = opened.model_of("server", "0").encode(texts=texts)
    np.testing.assert_array_equal(Viewer.of(opened, "server").before.encode(texts=texts), kept)
    assert np.abs(opened.model_of("server", "last").encode(texts=texts) - kept).max() > 1e-4


def test_texts_of_the_data_are_not_markup(tiny: Config, tmp_path: Path, monkeypatch: Any) -> None:
    opened = run(Experiment.load(tiny), tmp_path / "run")
    entry = Shelf.entry
    monkeypatch.setattr(Shelf, "entry", lambda *at, **more: entry(*at)._replace(text="<script>x</script>"))
    text = write_gallery(opened).read_text()
    assert "<script>x" not in text
    assert "&lt;script&gt;x" in text


def test_the_command_and_what_it_refuses(tiny_run: Path, tmp_path: Path, cli: Any, tiny: Config) -> None:
    code, message, _ = cli("gallery", tiny_run, "--out", tmp_path / "g.html", "--queries", 1)
    assert (code, message.startswith(f"written: {tmp_path / 'g.html'} (images")) == (0, True)
    for group in tiny["clients"].values():
        group["test_split"] = None
    tiny["algorithm"]["name"], tiny["server"] = "local", None
    del tiny["clients"]["paired"]
    tiny["public"] = None
    opened = run(Experiment.load(tiny), tmp_path / "run")
    with pytest.raises(RunError, match=r"no participant of .* has test data"):
        write_gallery(opened)


def test_samples_on_the_page_are_not_markup_and_are_those_of_masks_and_sounds_alone(tiny_run: Path) -> None:
    opened = open_run(tiny_run)
    assert judged_samples(opened) == []
    page = html_report(opened.records, figures={}, samples=[[GalleryEntry("data:,", "<b>truth", None)]])
    assert ("&lt;b&gt;truth" in page, "<b>truth" in page) == (True, False)
