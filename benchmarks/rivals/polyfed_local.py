"""polyfed's local engine, as a user runs it: messages, checks, a run folder and a checkpoint every round."""

from __future__ import annotations

import sys
from pathlib import Path

from problem import Problem

sys.path.insert(0, str(Path(__file__).parent.parent))
import federations
from peers import experiment

problem = Problem.read(data=False)
with federations.prepared(experiment(problem.clients, problem.rounds)) as session:
    loop = session.loop()
    loop.experiment.algorithm.setup(loop.server)
    for number in range(1, problem.rounds + 1):
        loop.round(number)
        problem.clock.lap()
    weights = [value.numpy() for value in federations.global_weights(session).values()]
problem.finish(weights)
