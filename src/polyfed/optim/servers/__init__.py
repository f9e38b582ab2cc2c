"""Server optimisers, one a module."""
