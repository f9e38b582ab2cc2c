"""Stacked optimisers against as many of their own, in whatever order their models step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyfed.optim.settings import OptimizerSettings, clip_gradients
from polyfed.optim.stacked import StackedOptimizer, clipped_rows
from polyfed.optim.state import optimizer_tensors

SHAPES = ((3, 4), (4,), (2, 3, 2, 2), ())
TURNS = ([0, 1, 2, 3], [0, 1], [1, 3], [0, 1, 2, 3], [2], [0, 2, 3], [0, 1, 2])
"""Rows that step: all, the first, others; row 3 has fewer steps behind it than row 0."""


def models(layout: torch.memory_format) -> list[list[nn.Parameter]]:
    torch.manual_seed(0)
    made = [[nn.Parameter(torch.randn(shape)) for shape in SHAPES] for _ in range(4)]
    for own in made:
        own[2].data = own[2].data.contiguous(memory_format=layout)
    return made


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "sgd", "momentum": 0.0},
        {"kind": "sgd", "nesterov": True},
        {"kind": "adam"},
        {"kind": "adamw"},
        {"kind": "adamp", "nesterov": True},
        {"kind": "adamp"},
    ],
    ids=str,
)
def test_rows_step_as_by_themselves(settings: dict[str, object], layout: torch.memory_format) -> None:
    """With momenta of before, counters that come apart, a parameter without a gradient, and state left as theirs."""
    rules = OptimizerSettings.model_validate({"lr": 0.1, "weight_decay": 0.1} | settings)
    alone, together = models(layout), models(layout)
    lone, joint = ([rules.build(own) for own in parameters] for parameters in (alone, together))
    draw = torch.Generator().manual_seed(1)

    def step_alone(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(parameters[:3], gradients, strict=True):
            parameter.grad = gradient.clone(memory_format=torch.preserve_format)
        optimizer.step()

    early = [torch.randn(shape, generator=draw) for shape in SHAPES[:3]]
    early[2] = early[2].contiguous(memory_format=layout)
    for own, optimizer in ((alone[1], lone[1]), (together[1], joint[1])):
        step_alone(own, optimizer, early)
    stacks = [torch.stack([own[place].detach() for own in together]).contiguous() for place in range(len(SHAPES))]
    stacked = StackedOptimizer(joint, stacks)
    for rows in TURNS:
        gradients = [torch.randn(len(rows), *shape, generator=draw) for shape in SHAPES[:3]]
        stacked.step(rows, [*gradients, None], [0.05])
        for position, row in enumerate(rows):
            lone[row].param_groups[0]["lr"] = 0.05
            step_alone(alone[row], lone[row], [
                gradient[position].contiguous(memory_format=layout if gradient.ndim == 5 else torch.contiguous_format)
                for gradient in gradients
            ])  # fmt: skip
    for row in range(4):
        stacked.release(row)
        names = [str(place) for place in range(len(SHAPES))]
        states = [
            optimizer_tensors(optimizers[row], zip(names, parameters[row], strict=True))
            for optimizers, parameters in ((lone, alone), (joint, together))
        ]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value, atol=1e-6, rtol=1e-5)
        for place, own in enumerate(alone[row]):
            torch.testing.assert_close(stacks[place][row], own.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("limit", [0.5, 100.0, None])
def test_rows_are_clipped_by_their_own_norms(limit: float | None) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(3, 4, 2), None, torch.randn(3, 5) * torch.tensor([[0.01], [1.0], [10.0]])]
    clipped = clipped_rows(gradients, limit)
    assert clipped[1] is None
    for row in range(3):
        own = [nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(5))]
        own[0].grad, own[1].grad = gradients[0][row].clone(), gradients[2][row].clone()  # type: ignore[index]
        clip_gradients(own, limit)
        torch.testing.assert_close(clipped[0][row], own[0].grad)  # type: ignore[index]
        torch.testing.assert_close(clipped[2][row], own[1].grad)  # type: ignore[index]
