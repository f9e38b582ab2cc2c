"""Gated linear layers: shut gates change nothing, gradients are those of the formula, merging changes no output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyfed.models.blocks import ROLES, gated, linears, stack, undecayed

WIDTH = 8


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return stack(WIDTH, 2, 2, 4, 0.0)


def passed(module: nn.Module, x: Tensor) -> Tensor:
    for block in module.children():
        x = block(x, None)
    return x


def others(module: nn.Module, part: str = "blocks") -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn_like(layer.weight) for name, layer in linears(module, ROLES[part]).items()}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("part", "count"), [("blocks", 8), ("attention", 4), ("mlp", 4)])
def test_one_gate_for_each_linear_layer_of_the_part(part: str, count: int) -> None:
    module = blocks()
    with gated(module, others(module, part)) as gates:
        assert len(gates) == count
        assert all(gate.gate.shape == (1,) for gate in gates.values())


def test_shut_gates_give_the_plain_model_bit_for_bit_and_no_gradient_to_what_is_behind(x: Tensor) -> None:
    module = blocks()
    plain = passed(module, x)
    with gated(module, others(module)) as gates:
        out = passed(module, x)
        assert torch.equal(out, plain)
        out.square().sum().backward()
        for gate in gates.values():
            assert gate.out.grad is not None
            assert not gate.out.grad.any()
            assert gate.gate.grad is not None
            assert gate.gate.grad.any()


def test_gradients_are_those_of_the_formula() -> None:
    layer = nn.Sequential(nn.Linear(4, 3))
    layer.role = "mlp"  # type: ignore[assignment]
    out, x = torch.randn(3, 4), torch.randn(5, 4)
    with gated(layer, {"0": out}) as gates:
        gate = gates["0"]
        with torch.no_grad():
            gate.gate.fill_(0.3)
        effective = (layer[0].parametrizations.weight.original + 0.3 * out).detach().requires_grad_()  # type: ignore
        layer(x).pow(3).sum().backward()
        (x @ effective.T + layer[0].bias.detach()).pow(3).sum().backward()
        assert effective.grad is not None
        assert torch.allclose(gate.gate.grad, (effective.grad * out).sum(), rtol=1e-4)
        assert torch.allclose(gate.out.grad, 0.3 * effective.grad, rtol=1e-4)
        assert torch.allclose(layer[0].parametrizations.weight.original.grad, effective.grad, rtol=1e-4)  # type: ignore


def test_merging_changes_no_output_and_leaves_a_plain_model(x: Tensor) -> None:
    module = blocks()
    names = [name for name, _ in module.named_parameters()]
    with gated(module, others(module)) as gates:
        for k, gate in enumerate(gates.values()):
            nn.init.constant_(gate.gate, 0.1 * (k - 3))
        before = passed(module, x)
    assert torch.allclose(passed(module, x), before, atol=1e-5)
    assert [name for name, _ in module.named_parameters()] == names  # names and their order, on which sums depend
    assert all(type(layer) is nn.Linear for layer in linears(module, ROLES["blocks"]).values())


def test_after_an_error_the_layers_are_plain_again() -> None:
    module = blocks()
    with pytest.raises(RuntimeError, match="boom"), gated(module, others(module)):
        raise RuntimeError("boom")
    assert not any("parametrizations" in name for name, _ in module.named_parameters())


def test_frozen_weights_have_neither_gradient_nor_optimiser_state(x: Tensor) -> None:
    module = blocks()
    with gated(module, others(module), trainable=False) as gates:
        optimizer = torch.optim.AdamW([value for value in module.parameters() if value.requires_grad])
        passed(module, x).sum().backward()
        optimizer.step()
        for gate in gates.values():
            assert gate.out.grad is None
            assert gate.out not in optimizer.state
            assert gate.gate in optimizer.state


def test_weight_decay_spares_gates_and_what_is_behind_them() -> None:
    module = blocks()
    assert undecayed(module) == []
    with gated(module, others(module)) as gates:
        spared = {id(value) for value in undecayed(module)}
        assert spared == {id(value) for gate in gates.values() for value in (gate.out, gate.gate)}


def test_bf16_autocast(x: Tensor) -> None:
    module = blocks()
    with gated(module, others(module)) as gates, torch.autocast("cpu", torch.bfloat16):
        passed(module, x).sum().backward()
        assert all(torch.isfinite(gate.gate.grad).all() for gate in gates.values() if gate.gate.grad is not None)
