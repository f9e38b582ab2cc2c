"""Adapters by where they act: within layers, in the input, and behind the network."""
