"""Weights over clients, one a module."""
