"""Robust rules, one a module."""
