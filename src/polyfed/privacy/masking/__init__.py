"""Masked sums of integers: masks, keys and secret shares."""
