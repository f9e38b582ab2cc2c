"""Data: sources, views, samples, partitions."""
