import pytest
import torch
from safetensors.torch import load, save

from polyfed.core.errors import PayloadError
from polyfed.optim.settings import OptimizerSettings, load_optimizer_tensors, optimizer_tensors

SETTINGS = {
    "adamp": OptimizerSettings(kind="adamp", lr=0.01, weight_decay=0.1),
    "adamp-nesterov": OptimizerSettings(kind="adamp", lr=0.01, nesterov=True),
    "adamw": OptimizerSettings(kind="adamw", lr=0.01, weight_decay=0.1),
    "adam": OptimizerSettings(kind="adam", lr=0.01),
    "sgd": OptimizerSettings(kind="sgd", lr=0.01, momentum=0.9),
    "sgd-plain": OptimizerSettings(kind="sgd", lr=0.01, momentum=0.0),
}


def make(settings, weights=None):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    if weights is not None:
        model.load_state_dict(weights)
    return model, settings.build(model.parameters())


def train(model, optimizer, steps, seed):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=draw)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_training_goes_on_bit_for_bit_after_storage(settings):
    model, optimizer = make(settings)
    train(model, optimizer, 4, seed=1)
    stored = load(save(optimizer_tensors(optimizer, model.named_parameters())))
    other, restored = make(settings, model.state_dict())
    load_optimizer_tensors(restored, other.named_parameters(), stored)
    for which in ((model, optimizer), (other, restored)):
        train(*which, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    after, again = (optimizer_tensors(o, m.named_parameters()) for m, o in ((model, optimizer), (other, restored)))
    assert after.keys() == again.keys()
    assert all(torch.equal(after[key], again[key]) for key in after)


@pytest.mark.parametrize("kind", ["adamp", "adamw", "sgd"])
def test_a_fresh_state_trains_differently(kind):
    model, optimizer = make(SETTINGS[kind])
    train(model, optimizer, 4, seed=1)
    other, fresh = make(SETTINGS[kind], model.state_dict())
    train(model, optimizer, 3, seed=2)
    train(other, fresh, 3, seed=2)
    assert not torch.equal(model[0].weight, other[0].weight)


def test_names_are_kind_and_parameter():
    model, optimizer = make(SETTINGS["adamp"])
    assert optimizer_tensors(optimizer, model.named_parameters()) == {}
    train(model, optimizer, 1, seed=1)
    names = optimizer_tensors(optimizer, model.named_parameters())
    assert len(names) == 3 * 6
    assert {"step:0.weight", "exp_avg:0.weight", "exp_avg_sq:2.bias"} <= names.keys()


def test_order_and_subset_of_the_optimisers_parameters_do_not_matter():
    model, _ = make(SETTINGS["sgd"])
    named = dict(model.named_parameters())
    optimizer = SETTINGS["sgd"].build([named["2.bias"], named["0.weight"]])
    train(model, optimizer, 2, seed=1)
    stored = optimizer_tensors(optimizer, named.items())
    turned = SETTINGS["sgd"].build([named["0.weight"], named["2.bias"]])
    load_optimizer_tensors(turned, reversed(named.items()), stored)
    assert torch.equal(turned.state[named["2.bias"]]["momentum_buffer"], stored["momentum_buffer:2.bias"])
    assert torch.equal(turned.state[named["0.weight"]]["momentum_buffer"], stored["momentum_buffer:0.weight"])


def test_saved_and_loaded_tensors_are_copies():
    model, optimizer = make(SETTINGS["adamp"])
    train(model, optimizer, 2, seed=1)
    stored = optimizer_tensors(optimizer, model.named_parameters())
    before = {key: value.clone() for key, value in stored.items()}
    load_optimizer_tensors(optimizer, model.named_parameters(), stored)
    train(model, optimizer, 2, seed=2)
    assert all(torch.equal(stored[key], before[key]) for key in stored)


def test_loading_replaces_the_whole_state():
    model, optimizer = make(SETTINGS["adamp"])
    train(model, optimizer, 2, seed=1)
    load_optimizer_tensors(optimizer, model.named_parameters(), {})
    assert optimizer_tensors(optimizer, model.named_parameters()) == {}


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"exp_avg:0.wieght": torch.zeros(4, 3)}, "did you mean '0.weight'"),
        ({"exp_avg:0.weight": torch.zeros(3, 4)}, r"shape \(3, 4\), not \(4, 3\)"),
    ],
)
def test_state_of_another_architecture_is_refused_and_nothing_changes(tensors, match):
    model, optimizer = make(SETTINGS["adamp"])
    train(model, optimizer, 1, seed=1)
    before = optimizer_tensors(optimizer, model.named_parameters())
    with pytest.raises(PayloadError, match=match):
        load_optimizer_tensors(optimizer, model.named_parameters(), before | tensors)
    after = optimizer_tensors(optimizer, model.named_parameters())
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_state_that_is_no_tensor_is_refused():
    model, optimizer = make(SETTINGS["sgd"])
    optimizer.state[model[0].weight]["count"] = 3
    with pytest.raises(PayloadError, match="'count' of parameter"):
        optimizer_tensors(optimizer, model.named_parameters())


@pytest.mark.parametrize("kind", ["adamp", "adamp-nesterov", "adamw", "sgd"])
def test_weights_of_another_layout_go_on_bit_for_bit_after_storage(kind):
    # stored tensors are contiguous, and a fused kernel reads memory in order whatever the strides
    weight = torch.randn(6, 5, 3, 3).contiguous(memory_format=torch.channels_last)
    models = [torch.nn.ParameterDict({"conv": torch.nn.Parameter(weight.clone())}) for _ in range(2)]
    first, second = (SETTINGS[kind].build(model.parameters()) for model in models)

    def step(model, optimizer, seed):
        optimizer.zero_grad()
        pull = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        (model["conv"] * pull).sum().backward()
        optimizer.step()

    step(models[0], first, 1)
    named = [list(model.named_parameters()) for model in models]
    stored = load(save({k: v.contiguous() for k, v in optimizer_tensors(first, named[0]).items()}))
    load_optimizer_tensors(second, named[1], stored)
    models[1]["conv"].data.copy_(models[0]["conv"].data)
    for model, optimizer in zip(models, (first, second), strict=True):
        step(model, optimizer, 2)
    assert torch.equal(models[0]["conv"], models[1]["conv"])


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_the_fused_form_goes_on_from_the_state_of_the_plain_one(kind):
    of_torch = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[kind]
    options = {"lr": 0.01, "weight_decay": SETTINGS[kind].weight_decay}
    model, _ = make(SETTINGS[kind])
    plain = of_torch(model.parameters(), **options | ({"momentum": 0.9} if kind == "sgd" else {}))
    train(model, plain, 4, seed=1)
    other, fused = make(SETTINGS[kind], model.state_dict())
    load_optimizer_tensors(fused, other.named_parameters(), optimizer_tensors(plain, model.named_parameters()))
    for which in ((model, plain), (other, fused)):
        train(*which, 3, seed=2)
    assert all(group["fused"] for group in fused.param_groups)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
