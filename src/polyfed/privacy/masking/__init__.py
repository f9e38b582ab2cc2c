"""Arithmetic of sums whose terms nobody sees: whole numbers, masks, keys and shares."""
