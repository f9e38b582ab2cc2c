"""What everything else stands on: errors, typed settings and components, randomness, devices, files."""
