"""The page of the HTML report: its parts, with data missing, damaged, hostile or many."""

from __future__ import annotations

import json
import random

import pytest
import torch
import yaml
from html_pages import ALL_PARTS, Page, page_of, write_full
from safetensors.torch import save_file

from polyfed.core.errors import RunError
from polyfed.reporting.html.page import html_report, write_html_report
from polyfed.runs.records import RunRecords
from run_folders import write_lines, write_run

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;]]>"


@pytest.fixture
def full(run_folder):
    return write_full(run_folder)


def test_a_full_run_has_every_part(full):
    page = page_of(full)
    assert page.parts == ALL_PARTS
    assert [link["href"] for link in page.of("a")] == [f"#{part}" for part in ALL_PARTS]
    for text in ("my run", "What it is for.", "creamfl", "12 of 12", "complete", "cpu", "2.13.0", "Ties count against"):
        assert text in page.text
    assert "stopped" not in page.text


def test_the_file_is_written_where_asked_and_is_the_same_each_time(full, tmp_path):
    records = RunRecords.load(full)
    path = write_html_report(records)
    assert path == full / "report.html"
    other = write_html_report(records, tmp_path / "new" / "page.html")
    assert other == tmp_path / "new" / "page.html"
    assert other.read_bytes() == path.read_bytes()
    assert [file.name for file in other.parent.iterdir()] == ["page.html"]


def test_nothing_is_loaded_from_anywhere(full):
    text = html_report(RunRecords.load(full))
    page = Page(text)
    for name, attributes in page.elements:
        assert name not in {"link", "iframe", "object", "embed", "base", "form", "video", "audio", "source"}
        for key in ("src", "href", "action", "xlink:href", "srcset", "poster", "data"):
            assert (attributes.get(key) or "#").startswith(("#", "data:image/png;base64,"))
        assert not any(key.startswith("on") for key in attributes)
        assert "url(" not in (attributes.get("style") or "")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = (each["content"] for each in page.of("meta") if "http-equiv" in each)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "img-src data:" in policy
    assert str(full) not in text


def test_text_of_the_run_is_escaped_everywhere(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    holding = {"group": HOSTILE, "source": HOSTILE, "split": HOSTILE, "items": 3, "samples": 3, "labels": {HOSTILE: 3}}
    (folder / "partition.json").write_text(json.dumps({HOSTILE: holding}))
    settings = {key: HOSTILE for key in ("name", "description", "algorithm")}
    settings |= {
        "run": {"rounds": 2},
        "clients": {HOSTILE: {"task": HOSTILE, "models": [{"encoders": {HOSTILE: HOSTILE}}]}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "environment.json").write_text(json.dumps({"device": HOSTILE, "versions": {HOSTILE: HOSTILE}}))
    metrics = {HOSTILE: 1.0, f"{HOSTILE}_to_b_r@1": 2.0, "accuracy": 3.0}
    lines = [
        {"round": number, "participant": participant, "kind": kind, "metrics": metrics}
        for number in (1, 2)
        for participant in ("server", HOSTILE)
        for kind in ("test", "train")
    ]
    event = {"round": 1, "participant": HOSTILE, "kind": "event", "event": HOSTILE, "reason": HOSTILE}
    write_lines(folder / "metrics.jsonl", [*lines, *[event] * 9, event | {"event": "client_excluded"}])
    sent = {"round": 2, "client": HOSTILE, "direction": "up", "bytes": 9}
    sent |= {key: HOSTILE for key in ("step", "bundle", "kind", "dtype")}
    write_lines(folder / "ledger.jsonl", [sent])
    arrays = folder / "arrays" / "weights"
    arrays.mkdir(parents=True)
    for number in (1, 2):
        save_file(
            {"values": torch.rand(1, 5)}, arrays / f"round-000{number}.safetensors", {"clients": json.dumps([HOSTILE])}
        )
    page = page_of(folder)
    assert page.parts == ALL_PARTS
    assert len(page.of("script")) == 1
    assert all((image["src"] or "").startswith("data:") for image in page.of("img"))
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert page.text.count(HOSTILE) > 20


def test_a_run_that_was_killed_says_so(full):
    config = yaml.safe_load((full / "config.yaml").read_text())
    (full / "config.yaml").write_text(yaml.safe_dump(config | {"run": {"rounds": 40}}))
    whole = (full / "metrics.jsonl").read_bytes()
    (full / "metrics.jsonl").write_bytes(whole[:-20])
    page = page_of(full)
    assert "stopped after round 12 of 40" in page.text
    assert "Warning: metrics.jsonl: the last line is cut off" in page.text


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.99])
def test_logs_cut_anywhere_are_shown_as_far_as_they_go(full, share):
    for name in ("metrics", "ledger", "timing"):
        path = full / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    page = page_of(full)
    assert {"partition", "weights", "clients", "configuration"} <= set(page.parts)
    assert ("traffic" in page.parts) == (share > 0.0)


def test_an_empty_folder_has_a_page_without_parts(tmp_path):
    page = page_of(tmp_path)
    assert page.parts == ["reading"]
    assert "0 rounds" in page.text


MISSING = {
    "metrics.jsonl": {"server", "curves", "events"},
    "partition.json": {"partition"},
    "config.yaml": {"configuration"},
    "arrays": {"weights"},
    "environment.json": set(),
}


@pytest.mark.parametrize("name", MISSING)
def test_parts_without_data_are_left_out(full, name):
    (full / name).rename(full.parent / name)
    assert set(page_of(full).parts) == set(ALL_PARTS) - MISSING[name]


def test_without_ledger_time_is_shown_and_without_both_nothing(full):
    (full / "ledger.jsonl").unlink()
    page = page_of(full)
    assert "traffic" in page.parts
    assert "Where the bytes went" not in page.text
    assert "bytes up" not in page.text
    (full / "timing.jsonl").unlink()
    assert "traffic" not in page_of(full).parts


def test_a_run_without_server_model_shows_its_clients(full):
    lines = [json.loads(line) for line in (full / "metrics.jsonl").read_text().splitlines()]
    write_lines(full / "metrics.jsonl", [line for line in lines if line["participant"] != "server"])
    page = page_of(full)
    assert set(page.parts) == set(ALL_PARTS) - {"server"}
    assert "server r1_sum" not in page.text
    assert "image clients, mean accuracy" in page.text


def test_a_run_without_clients_shows_its_server(tmp_path):
    lines = [{"round": n, "participant": "server", "kind": "test", "metrics": {"accuracy": 3.0 * n}} for n in (0, 1, 2)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    page = page_of(tmp_path)
    assert page.parts == ["server", "reading"]
    assert "server accuracy, test 6.00 %" in page.text


def test_damage_is_an_error_that_names_the_file(full):
    (full / "environment.json").write_text("{")
    with pytest.raises(RunError, match=r"environment\.json is damaged"):
        html_report(RunRecords.load(full))
    (full / "environment.json").write_text("[]")
    with pytest.raises(RunError, match=r"environment\.json holds a list"):
        html_report(RunRecords.load(full))


def test_damaged_arrays_are_an_error(full):
    (full / "arrays" / "weights.image" / "round-0001.safetensors").write_bytes(b"x")
    with pytest.raises(RunError, match="damaged"):
        html_report(RunRecords.load(full))


def test_a_thousand_clients_fit(tmp_path):
    draw = random.Random(0)
    groups = {"image": 600, "text": 300, "paired": 100}
    clients = {f"{group}-{n:03d}": group for group, number in groups.items() for n in range(number)}
    labels = {client: {f"class {c}": draw.randint(1, 9) for c in range(100)} for client in clients}
    base = {"source": "s", "split": "t", "items": 400, "samples": 400}
    holdings = {
        client: base | {"group": group, "labels": None if group == "paired" else labels[client]}
        for client, group in clients.items()
    }
    (tmp_path / "partition.json").write_text(json.dumps(holdings))
    metrics, ledger = [], []
    for number in range(1, 21):
        for client in clients:
            found = {"accuracy": draw.random(), "loss": 1.0}
            metrics.append({"round": number, "participant": client, "kind": "test", "metrics": found})
            if draw.random() < 0.3:
                event = {
                    "round": number,
                    "participant": client,
                    "kind": "event",
                    "event": "client_excluded",
                    "reason": "late",
                }
                metrics.append(event)
            line = {"round": number, "client": client, "direction": "up", "step": "fit", "bundle": "w"}
            ledger.append(line | {"kind": "weights", "dtype": "float32", "bytes": 1000})
    write_lines(tmp_path / "metrics.jsonl", metrics)
    write_lines(tmp_path / "ledger.jsonl", ledger)
    for name in ("weights.image", "weights.text"):
        (tmp_path / "arrays" / name).mkdir(parents=True)
        for number in range(1, 6):
            path = tmp_path / "arrays" / name / f"round-{number:04d}.safetensors"
            save_file({"values": torch.rand(1000, 500)}, path, {"clients": json.dumps(list(clients))})
    records = RunRecords.load(tmp_path)
    text = html_report(records)
    assert len(text.encode()) < 5_000_000
    page = Page(text)
    assert {"curves", "partition", "traffic", "weights", "clients", "events"} <= set(page.parts)
    assert "the 30 with most bytes of 1,000" in page.text
    assert "the last 2,000 of" in page.text


def test_a_single_round_is_drawn(tmp_path):
    page = page_of(write_run(tmp_path / "short", rounds=1))
    assert {"server", "curves", "traffic", "weights"} <= set(page.parts)
    assert all(len(chart["x"]) == 1 for chart in page.charts[:-1])  # the last is that of the weights
    assert page.of("circle")
