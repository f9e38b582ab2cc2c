"""Optimisers, learning-rate schedules and optimiser state by parameter name."""
