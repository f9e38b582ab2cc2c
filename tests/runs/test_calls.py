"""Calls of functions that a small client takes in a round: a figure without noise, which bounds what Python costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 2250
"""Calls of a client with six tensors and five optimiser steps; the same loop in plain PyTorch takes 1,150."""

PROGRAM = """
import json, sys
from collections import Counter

sys.path.insert(0, sys.argv[1])
from peers import experiment, federations

def calls(clients):
    seen = Counter()
    with federations.prepared(experiment(clients, 2)) as session:
        loop = session.loop()
        loop.experiment.algorithm.setup(loop.server)
        loop.round(1)
        sys.setprofile(lambda frame, event, argument: seen.update([event]))
        loop.round(2)
        sys.setprofile(None)
    return seen["call"] + seen["c_call"]

print(json.dumps([calls(int(clients)) for clients in sys.argv[2:]]))
"""


def test_a_small_client_takes_few_calls_however_many_there_are() -> None:
    # in a process of its own: here shapes are checked at each call
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[2] / "benchmarks"), "10", "20", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    few, some, many = json.loads(done.stdout.splitlines()[-1])
    assert (some - few) / 10 <= MOST
    assert (many - some) / 20 <= 1.01 * (some - few) / 10
