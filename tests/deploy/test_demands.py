"""Demands of a site on the protection of runs: enforced when it opens a run, printed by its check."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

from federations import experiment_settings

from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.errors import BudgetError, PayloadError, RefusedError
from polyfed.deploy import host
from polyfed.deploy.check import check_site
from polyfed.deploy.folders import SiteFolder
from polyfed.deploy.host import Announced, open_host, require_met
from polyfed.deploy.init import create_federation
from polyfed.deploy.settings import SiteConfig
from polyfed.engines.run_spec import RunSpec
from polyfed.privacy.accounting import epsilon_of
from polyfed.privacy.answered import AnsweredAsk, AnsweredAsks
from polyfed.privacy.guard import PRIVATE
from polyfed.privacy.masking.mask_keeper import KEYS, REQUEST
from polyfed.privacy.private_training import training_cost
from polyfed.privacy.secure_sum import TOTAL, PairwiseMasks, SecureSum
from polyfed.privacy.settings import AggregationSettings
from polyfed.runs.experiment import Experiment
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, Weights

NOISE = {"reply": {"weights": 1.0, "noise_multiplier": 4.0}}  # epsilon 1.99 at delta 1e-5 a reply, 2.94 in two


def experiment(privacy: Any = None, **run: Any) -> Experiment:
    settings = experiment_settings()
    settings["run"] |= {"rounds": 2, "evaluate_clients": False} | run
    return Experiment.load(settings | {"privacy": privacy})


def site(folder: Path, made_of: Experiment | None = None, **demands: Any) -> SiteFolder:
    create_federation(folder, made_of or experiment(), ["localhost"], keys=True)
    path = folder / "hospital" / "site.yaml"
    if demands:
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"demands": demands}))
    return SiteFolder(folder / "hospital")


def opened(site: SiteFolder, run: Experiment, name: str = "a-run") -> host.Host:
    return open_host(run.spec(name, "").model_dump_json(), {"config": str(site.config)})


def test_a_run_that_asks_for_test_metrics_is_refused_and_so_is_an_unannounced_request_for_them(tmp_path: Path) -> None:
    made = site(tmp_path / "f", max_epsilon=9.0)
    reason = r"has demands.metrics: false, but the run asks for test metrics; set run.evaluate_clients: false"
    with pytest.raises(PayloadError, match=reason):
        opened(made, experiment(NOISE | {"metrics": "clear"}, evaluate_clients=True))
    hosted = opened(made, experiment(NOISE | {"metrics": "clear"}), "quiet").site
    answer = hosted.answer(Request(hosted.infos[0].id, "assess", 1, 0, None, Payload({})))
    assert answer.failure is not None
    assert answer.failure.text == "PayloadError: 'assess': no test metrics leave this site (demands.metrics: false)"


def test_training_with_too_little_noise_for_the_samples_here_is_refused(tmp_path: Path) -> None:
    run = experiment({"samples": {"noise_multiplier": 0.5}})
    made = site(tmp_path / "f", run, max_epsilon=2.0)
    reason = r"in 2 rounds of the run 'hospital-0' would spend epsilon [\d.]+"
    with pytest.raises(PayloadError, match=rf"demands.max_epsilon: 2 \(at .*{reason}; add 'privacy', raise"):
        opened(made, run)
    assert not list((tmp_path / "f" / "hospital" / "state").rglob("run.json")), "it is not among those that began"
    (finding,) = (finding for finding in check_site(made.path, network=False) if finding.level == "error")
    assert finding.what == "demands.max_epsilon"
    assert re.match(rf"2 \(at delta 1e-05, over all runs\); {reason}; .*'hospital-1'", finding.detail)
    assert finding.remedy == "add 'privacy', raise its noise or lower its rounds"


# ---- sums, and kinds of tensors


def masked(**run: Any) -> Experiment:
    aggregation = AggregationSettings(secure=PairwiseMasks(), clip=None)
    return experiment(**run).model_copy(update={"aggregation": aggregation})


def exchanging(method: dict[str, Any], secure: str | None = None, privacy: Any = None) -> RunSpec:
    """A run of a method, as a server announces it: whatever it would itself refuse to begin."""
    plain = experiment(privacy).spec("a-run", "")
    sums = SUMS[secure] if secure in SUMS else secure and SecureSum.model_validate(secure)
    return plain.model_copy(update={"algorithm": Algorithm.model_validate(method), "secure": sums})


def demanded(**demands: Any) -> SiteConfig:
    return SiteConfig.model_validate({"name": "hospital", "clients": {}, "data": {"sources": {}}, "demands": demands})


FEDAVG = {"name": "fedavg"}
SUMS = {"narrow": PairwiseMasks(range=0.001)}


@pytest.mark.parametrize(
    ("demands", "run", "message"),
    [
        ({"max_epsilon": 2.0}, (FEDAVG,), "but the run has no 'privacy'; add 'privacy'"),
        ({"max_epsilon": 2.0}, (FEDAVG, None, NOISE), "in 2 rounds of the run each client would spend epsilon 2.9"),
        ({"weights": "protected"}, (FEDAVG,), "'fit' of 'fedavg' sends weights; add 'privacy' for these"),
        ({"weights": "never"}, (FEDAVG, None, NOISE), "'fit' of 'fedavg' sends weights; choose another method"),
        ({"weights": "summed"}, (FEDAVG, None, NOISE), "'fit' of 'fedavg' sends weights; set .*pairwise_masks"),
        ({"sums": "only"}, (FEDAVG,), "'fit' of 'fedavg' sends 'weights' alone; set .*pairwise_masks"),
        # a server that announces sums, and would see every reply
        ({"sums": "only"}, (FEDAVG, "unmasked"), "'fit' of 'fedavg' sends 'weights' alone"),
        ({"sums": "only"}, ({"name": "fed_mae"}, "pairwise_masks"), "sends numbers such as losses alone"),
        ({"sums": "only"}, ({"name": "scaffold"}, "pairwise_masks"), "'controlled_fit' of 'scaffold' sends 'weights'"),
        ({"smallest_range": 64.0}, (FEDAVG, "narrow"), "aggregation.secure.range is 0.001: .*; raise aggregation"),
        ({"representations": "never"}, ({"name": "creamfl"},), "sends representations; choose another"),
        ({"representations": "summed"}, ({"name": "fedmd"},), "sends representations; set"),
    ],
)
def test_a_run_that_protects_less_is_refused(demands: Any, run: tuple[Any, ...], message: str) -> None:
    ((name, value),) = demands.items()
    shown = f"{value:g}" if name == "max_epsilon" else value
    with pytest.raises(RefusedError, match=f"site 'hospital' has demands.{name}: {shown}.*{message}"):
        require_met(Announced(exchanging(*run), demanded(**demands)))


@pytest.mark.parametrize(
    ("demands", "method", "secure"),
    [
        ({"sums": "only"}, FEDAVG, "pairwise_masks"),
        ({"sums": "only", "weights": "summed"}, {"name": "fedcola"}, "pairwise_masks"),
        ({"sums": "only"}, {"name": "creamfl", "teacher": {"weights": "count"}}, "pairwise_masks"),
        ({"weights": "never", "logits": "never"}, {"name": "fedmd"}, None),  # which exchanges representations
        ({"sums": "only"}, {"name": "local"}, None),  # nothing leaves
    ],
)
def test_what_meets_the_demands_is_let_in(demands: Any, method: Any, secure: str | None) -> None:
    require_met(Announced(exchanging(method, secure), demanded(**demands)))


def test_a_server_that_announces_masks_gets_no_reply_without(tmp_path: Path) -> None:
    place = opened(site(tmp_path / "f", sums="only"), masked()).site
    client = place.infos[0].id
    model = place.federation.client_model(place.federation.members[client]).state_dict()
    refusals = {"no reply goes out in the clear": {}, "keys of this sum are missing here": {TOTAL: 24}}
    for reason, fields in refusals.items():
        answer = place.answer(Request(client, "fit", 1, 0, None, Payload({"weights": Weights(model), **fields})))
        assert answer.payload is None
        assert answer.failure is not None
        assert reason in answer.failure.text
    assert not list((tmp_path / "f" / "hospital" / "state").rglob("*.safetensors")), "nothing was trained"


def test_components_of_sums_are_not_imported_unless_the_site_allows_it(tmp_path: Path) -> None:
    spec = json.loads(experiment().spec("a-run", "").model_dump_json()) | {"secure": {"name": "antigravity.Sums"}}
    with pytest.raises(PayloadError, match=r"'antigravity.Sums' is not allowed at site 'hospital'"):
        open_host(json.dumps(spec), {"config": str(site(tmp_path / "f").config)})
    assert "antigravity" not in sys.modules


# ---- budgets


def test_a_run_that_protects_enough_is_let_in_and_counted_with_those_before(tmp_path: Path) -> None:
    made = site(tmp_path / "f", max_epsilon=3.0, weights="protected")
    for number in (1, 2):
        place = opened(made, experiment(NOISE, seed=number), f"run-{number}").site
        assert place.guard is not None
        client = place.infos[0].id
        model = place.federation.client_model(place.federation.members[client]).state_dict()
        sent = Payload({"weights": Weights(model)})
        place.handle(Request(client, "fit", 1, 0, None, sent))
    assert len(place.guard.ledger(client).costs()) == 2
    with pytest.raises(BudgetError, match=r"2 replies spent epsilon 2\.94 at delta 1e-05, one more"):
        place.handle(Request(client, "fit", 2, 0, None, sent))
    spent = place.answer(Request(client, "fit", 2, 0, None, sent), tracebacks=False).failure
    assert spent is not None
    assert re.fullmatch(r"BudgetError: its privacy budget is spent; error \w{8} in the site's log", spent.text)
    assert (made.path / "state" / PRIVATE / "secret").is_file()
    seen = {finding.what: finding for finding in check_site(made.path, network=False)}
    assert {what: finding.detail for what, finding in seen.items() if what.startswith("demands.")} == {
        "demands.max_epsilon": "3 (at delta 1e-05, over all runs); the run has no 'privacy'",
        "demands.metrics": "false; the planned run meets it",
        "demands.weights": "protected; 'fit' of 'fedavg' sends weights",
    }
    assert seen["protection in run-1"].detail == (
        "fit of 'fedavg': weights clipped to norm 1; noise multiplier 4; planned epsilon 2.94 at delta 1e-05 in 2 "
        "replies"
    )
    assert seen["protection in run-2"].detail.endswith("unlike plan.yaml in privacy, seed (2, planned 0)")
    assert seen["protection in run-2"].level == "warning"
    assert seen[f"spent by {client}"].detail == "epsilon 2.94 at delta 1e-05 in 2 replies, of 3"


@pytest.mark.parametrize(
    ("plan", "demands", "difference"),
    [
        (
            experiment({"reply": {"weights": 1.0}, "budget": {"epsilon": 5.0, "delta": 1e-6}}),
            {"max_epsilon": 5.0, "delta": 1e-6, "weights": "protected", "metrics": False},
            "privacy",
        ),
        (masked(), {"sums": "only", "max_epsilon": None, "weights": "allowed"}, "secure"),
    ],
    ids=["noise", "masks"],
)
def test_sites_of_a_protected_experiment_demand_its_plan(
    tmp_path: Path, plan: Experiment, demands: dict[str, Any], difference: str
) -> None:
    made = site(tmp_path / "f", plan)
    own = SiteConfig.load(made.config).demanded
    assert {name: getattr(own, name) for name in demands} == demands
    opened(made, plan)
    with pytest.raises(RefusedError, match=rf"demands\.plan: exact, but the run differs from it in {difference}"):
        opened(made, experiment(), "bare")


# ---- deploy check of the planned run


def lines(made: SiteFolder) -> str:
    return "\n".join(map(str, check_site(made.path, network=False)))


def test_the_check_lists_what_masks_hide_and_what_stays_in_the_clear(tmp_path: Path) -> None:
    seen = lines(site(tmp_path / "f", masked(evaluate_clients=True)))
    assert "protection in the plan: fit of 'fedavg' in masked sums" in seen
    assert re.search(r"fit: weights \(25 tensors .*; masked: the server gets the sum\), num_examples .*masked", seen)
    assert "assess: numbers such as metrics of its test (float; in the clear)" in seen
    assert all(f": {phase}: " in seen for phase in ("mask_keys", "mask_shares", "mask_opening"))
    assert "stays in the clear: test metrics, the description at joining (name, group, " in seen
    for demand in ("plan: exact", "sums: only"):
        assert f"demands.{demand}; the planned run meets it" in seen


def test_the_check_lists_what_is_noisy_at_which_epsilon(tmp_path: Path) -> None:
    seen = lines(site(tmp_path / "f", experiment(NOISE)))
    assert "MiB; with noise: clipped to norm 1, noise multiplier 4), num_examples (one int; in the clear)" in seen
    assert "noise multiplier 4; planned epsilon 2.94 at delta 1e-05 in 2 replies" in seen
    assert "assess" not in seen
    assert "stays in the clear: num_examples of fit, the description" in seen


def test_the_check_gives_the_epsilon_of_each_client_that_trains_with_noise(tmp_path: Path) -> None:
    plan = experiment({"samples": {"noise_multiplier": 1.0}})
    seen = lines(site(tmp_path / "f", plan))
    assert "(25 tensors of the model, float32+int64, 0.00 MiB; trained with noise (DP-SGD))" in seen
    cost = training_cost(plan.privacy.samples, 40, plan.clients["hospital"].training.batch_size, 1, None)
    assert f"planned for hospital-1: epsilon {epsilon_of([cost] * 2, 1e-5):.3g} at delta 1e-05 in 2 replies" in seen


def test_a_plan_that_does_not_meet_the_demands_is_an_error(tmp_path: Path) -> None:
    seen = lines(site(tmp_path / "f", sums="only"))
    assert re.search(r"error +demands.sums: only; 'fit' of 'fedavg' sends 'weights' alone; .*\n +-> set", seen)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("algorithm: {name: creamfl}", "method 'creamfl' is not allowed at site 'hospital'"),
        ("algorithm: {name: fedavg}", "run: is required and missing"),
        ("- 1", "plan.yaml"),
    ],
)
def test_a_plan_that_cannot_be_is_named(tmp_path: Path, content: str, message: str) -> None:
    made = site(tmp_path / "f")
    made.plan.write_text(content)
    (error,) = (line for line in lines(made).splitlines() if line.startswith("error"))
    assert "plan.yaml" in error
    assert message in error
    made.plan.unlink()
    assert "demands." not in lines(made)


def test_a_site_without_demands_is_reported(tmp_path: Path) -> None:
    made = site(tmp_path / "f")
    made.config.write_text(yaml.safe_dump(yaml.safe_load(made.config.read_text()) | {"demands": None}))
    seen = {finding.what: finding for finding in check_site(made.path, network=False)}
    assert seen["demands"].detail.startswith("none: replies may leave without noise")


# ---- the plan


def test_a_site_as_it_is_made_takes_part_in_the_planned_run_alone(tmp_path: Path) -> None:
    made = site(tmp_path / "f")
    planned = experiment_settings() | {"privacy": None}
    planned["run"] |= {"rounds": 2, "evaluate_clients": False}

    def run(**changes: Any) -> Experiment:
        return Experiment.load(planned | {key: planned[key] | value for key, value in changes.items()})

    assert opened(made, run(run={"rounds": 1}), "fewer").site.spec.rounds == 1
    assert opened(made, run(), "as-planned")
    for name, changes, reason in (
        ("more", {"run": {"rounds": 50}}, r"in rounds \(50, planned 2\); agree on a new plan.yaml"),
        ("other", {"algorithm": {"local_epochs": 7}}, r"in algorithm.local_epochs \(7, planned 1\)"),
        ("seeds", {"run": {"seed": 5}}, r"in seed \(5, planned 0\)"),
    ):
        with pytest.raises(RefusedError, match=r"'hospital' has demands.plan: exact, but the run differs .*" + reason):
            opened(made, run(**changes), name)
    made.plan.unlink()
    with pytest.raises(RefusedError, match=r"demands\.plan: exact, but this site has no plan\.yaml"):
        opened(made, run(run={"rounds": 1}), "unplanned")


def test_a_server_asks_for_no_round_beyond_the_run(tmp_path: Path) -> None:
    place = opened(site(tmp_path / "f"), experiment()).site
    answer = place.answer(Request(place.infos[0].id, "fit", 3, 0, None, Payload({})), tracebacks=False)
    assert answer.failure is not None
    assert answer.failure.text == "RefusedError: 'fit' of round 3: the run asks for it in rounds 1 to 2"


def test_runs_of_one_plan_share_a_folder_and_what_a_site_has_answered(tmp_path: Path) -> None:
    """Whatever a server calls the plan, an ask of it is answered for one request and one group of clients."""
    made = site(tmp_path / "f", masked())
    one = opened(made, masked(), "a-run").site
    other = opened(made, masked(rounds=1), "another-name").site
    client = one.infos[0].id
    assert one.terms.private is not None
    account = AnsweredAsks(one.terms.private / "answered", one.spec.terms)
    account.record(Request(client, "fit", 1, 0, None, Payload()), AnsweredAsk("0" * 64, [client, "beyond", "yonder"]))
    keys = Request(client, KEYS, 1, 0, None, Payload({REQUEST: "1" * 64}))
    assert "ask 0 of round 1 was answered here for another request" in str(other.answer(keys).failure)
    (folder,) = (made.path / "state").glob("[!.]*")
    assert json.loads((folder / "run.json").read_text())["run"] == "another-name"
    assert opened(site(tmp_path / "g", plan="any"), experiment(seed=3)).site.store.folder.parent.name != folder.name
