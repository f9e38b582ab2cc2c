"""Protection of clients: sums of which the server sees only the result, and noise with its account."""
