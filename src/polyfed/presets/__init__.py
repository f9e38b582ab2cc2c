"""Named experiments, one YAML file each."""
