"""Refusals of a site before anything runs: other versions, other data, foreign runs, methods it does not allow."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_grid import DESCRIBE, STEP, Rule, damages_request
from federations_in_process import InProcess
from struck_runs import events, reasons
from test_damaged_messages import facts

from grids import mostly_slow
from polyfed.core.errors import ExchangeError, PayloadError, PolyfedError
from polyfed.core.version import __version__
from polyfed.deploy.engines.flower_records import from_records, to_records
from polyfed.deploy.host import open_host


def spec(**values: Any) -> Callable[[Any], Any]:
    """A change of the run's spec in a message."""

    def change(seen: dict[str, Any]) -> None:
        seen["spec"] = json.dumps(json.loads(seen["spec"]) | values)

    return facts(change)


FOREIGN = "antigravity.Weights"


def foreign(name: str, **values: Any) -> tuple[Callable[[Any], Any], str]:
    """A component of a module that no site allows."""
    return spec(**values), f"'antigravity.{name}' is not allowed at site 'image'"


REFUSED = {
    "version": (spec(polyfed="9.9"), "the server runs polyfed 9.9, this site"),
    "method": (spec(algorithm={"name": "evil.Method"}), "method 'evil.Method' is not allowed at site 'image'"),
    "weighting": foreign("Weights", algorithm={"name": "creamfl", "teacher": {"weights": {"name": FOREIGN}}}),
    "weighting by its bare name": foreign("Weights", algorithm={"name": "creamfl", "teacher": {"weights": FOREIGN}}),
    "encoder": foreign("Net", server_model={"dim": 8, "encoders": {"image": {"name": "antigravity.Net"}}}),
    "view of an encoder": foreign(
        "View", server_model={"encoders": {"image": {"name": "resnet", "view": {"name": "antigravity.View"}}}}
    ),
    "attackers": (spec(attackers=[{"name": "sign_flip"}]), "asks clients of site 'image' to attack"),
    "path as a method": (spec(algorithm={"name": "../../evil"}), "method '../../evil' is not allowed"),
    "no method": (spec(algorithm=None), "damaged message: the run's spec"),
    "setting": (spec(algorithm={"name": "creamfl", "exec": "rm"}), "unknown key 'exec'"),
    "key": (spec(more=1), "unknown key 'more'"),
    "no spec": (facts(lambda seen: seen.update(spec="{")), "damaged message: the run's spec"),
    "pickle": (facts(lambda seen: seen.update(spec="\x80\x04cos\nsystem\n")), "damaged message: the run's spec"),
    "path": (spec(run="../elsewhere"), "the run's spec: run: String should match pattern"),
    "absolute path": (spec(run=f"{tempfile.gettempdir()}/elsewhere"), "spec: run: String should match pattern"),
    "hidden": (spec(run=".."), "the run's spec: run: String should match pattern"),
    "no name": (spec(run=""), "the run's spec: run: String should match pattern"),
    "number": (spec(run=7), "the run's spec: run: Input should be a valid string"),
    "public set": (spec(public_order="0123"), "DataError: error "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_site_that_cannot_take_part_reports_the_reason(refusing: InProcess, tmp_path: Path, name: str) -> None:
    change, message = REFUSED[name]
    node = refusing.node("image")
    refusing.grid.nodes[node] = (_changed(refusing, node, change), refusing.grid.nodes[node][1])
    with pytest.raises(ExchangeError, match="not all sites can take part: image: ") as caught:
        refusing.run(tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()
    site = refusing.folder / "image"
    own = "site.yaml agreed.yaml connection.yaml plan.yaml ca.crt node.key node.pub cache state"
    assert {path.name for path in site.iterdir()} <= {*own.split()}
    assert not list(tmp_path.rglob("elsewhere"))
    assert not (Path(tempfile.gettempdir()) / "elsewhere").exists()


@pytest.mark.parametrize("name", mostly_slow(["version", "method", "path"], "method"))
def test_a_site_refuses_steps_as_it_refuses_to_join(federation: InProcess, tmp_path: Path, name: str) -> None:
    """A server that has changed in the middle of a run."""
    change, message = REFUSED[name]
    federation.grid.rules = [Rule(damages_request(change), kind=STEP, client="image", round=2, step="fit")]
    folder = federation.run(tmp_path / "run", evaluate_clients=False).folder
    assert events(folder) == [(2, "image", "client_excluded"), (3, "image", "client_returned")]
    assert message in reasons(folder)["image"]


def _changed(federation: InProcess, number: int, change: Callable[[Any], Any]) -> Any:
    serve, _ = federation.grid.nodes[number]

    def changed(kind: str, seen: Any, parts: Any, config: Any) -> Any:
        reported, own = from_records(change(to_records(seen, parts)))
        return serve(kind, reported, own, config)

    return changed


LOUD = ("{}.Weights", "{}.X Y", "{}.1", "{}.", "{}.Weights\n", "loud-dashed.Weights")


@pytest.mark.parametrize("method", [False, True], ids=["weights", "method"])
def test_nothing_that_a_card_names_is_imported_unless_it_is_allowed(
    refusing: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: bool
) -> None:
    for module in ("loud_module", "loud-dashed"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"config": str(refusing.folder / "image" / "site.yaml")}
    known = {"run": "r", "seed": 0, "rounds": 1, "polyfed": __version__}
    for name in [name.format("loud_module") for name in LOUD] + ["loud_module"] * method:
        algorithm = {"name": name} if method else {"name": "creamfl", "teacher": {"weights": {"name": name}}}
        with pytest.raises((PolyfedError, ValueError), match=r"is not allowed at site 'image'|is not an import path"):
            open_host(json.dumps(known | {"algorithm": algorithm}), config)
        assert not {"loud_module", "loud-dashed"} & set(sys.modules), name


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 100_000, "nested deeper than"), ('{"a":' * 100_000, "nested deeper than"), ("[]]", "bracket")],
)
def test_a_card_is_read_within_bounds(refusing: InProcess, text: str, message: str) -> None:
    with pytest.raises(PayloadError, match=f"the run's spec: .*{message}"):
        open_host(text, {"config": str(refusing.folder / "image" / "site.yaml")})


@pytest.mark.slow
def test_all_that_polyfed_ships_is_allowed_by_default(federation: InProcess, tmp_path: Path) -> None:
    for site in ("paired", "image"):
        federation.edit(site, {"algorithms": []})
    assert events(federation.run(tmp_path / "run", rounds=1).folder) == []
    federation.grid.rules = [Rule(damages_request(spec(algorithm={"name": "mine.Method"})), kind=DESCRIBE, times=2)]
    message = r"not allowed at site 'image' \(algorithms: all methods that polyfed ships"
    with pytest.raises(ExchangeError, match=message):
        federation.run(tmp_path / "another")


@pytest.mark.parametrize(
    ("site", "change", "error", "log"),
    [
        (
            "image",
            {"public": {"source": "scenes", "items": 15}},
            "DataError",
            r"the public set here differs \(\w+, expected \w+\): compare source, split, items",
        ),
        ("image", {"nonsense": 1}, "ConfigError", "config: unknown key 'nonsense'"),
        (
            "paired",
            {"clients": {"image": {}}},
            "ConfigError",
            "clients.image: a group carries the name of its site; call it 'paired' or",
        ),
    ],
    ids=["public set", "broken", "another's client"],
)
def test_a_site_whose_file_does_not_fit_does_not_take_part(
    refusing: InProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture, site: str, change: Any, error: str, log: str
) -> None:
    if change.get("clients"):
        content = yaml.safe_load((refusing.folder / site / "agreed.yaml").read_text())
        change = {"clients": {"image": content["clients"][site] | {"count": 1}}}
    refusing.edit(site, change)
    with pytest.raises(ExchangeError, match=rf"{site}: {error}: error \w+ in the site's log"):
        refusing.run(tmp_path / "run")
    assert re.search(log, caplog.text)
