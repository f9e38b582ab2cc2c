"""Foundations: errors, typed settings and components, randomness, devices, files."""
