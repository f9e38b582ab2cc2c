"""One self-contained HTML page about a run: readable without scripts and without a network."""
