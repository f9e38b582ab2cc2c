"""Encoders, heads and the model that joins them."""
