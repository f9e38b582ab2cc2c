"""Columns of studies."""
