"""Where data comes from; one source a module."""
