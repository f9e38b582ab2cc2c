"""Attacks on simulated federations, one a module."""
