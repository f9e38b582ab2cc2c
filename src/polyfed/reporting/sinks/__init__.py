"""The sinks that ship with polyfed, one a module; each needs the pip extra of its name."""
