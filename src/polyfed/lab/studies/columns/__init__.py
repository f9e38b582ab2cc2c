"""What is measured of a finished run, a kind of column each."""
