"""FedAvg as one would write it for this one case: one model, no messages, no checks, nothing kept."""

from __future__ import annotations

import torch
from problem import Problem

problem = Problem.read()
model = problem.network()
live = list(model.parameters())
start = [value.detach().clone() for value in live]
for _ in range(problem.rounds):
    total = [torch.zeros_like(value) for value in start]
    for client in range(problem.clients):
        with torch.no_grad():
            torch._foreach_copy_(live, start)
        problem.train(model, client)
        torch._foreach_add_(total, [value.detach() for value in live])
    start = [value / problem.clients for value in total]
    problem.clock.lap()
problem.finish([value.numpy() for value in start])
