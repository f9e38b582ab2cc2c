"""Averagings of trained weights, one a module."""
