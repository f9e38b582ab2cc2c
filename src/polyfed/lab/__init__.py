"""The laboratory: questions to many runs, or to finished ones."""
