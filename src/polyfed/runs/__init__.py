"""Experiments and their runs: the loop, the run folder, records, finished runs."""
