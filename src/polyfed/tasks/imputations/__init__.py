"""Ways to fill in for modalities that samples lack."""
