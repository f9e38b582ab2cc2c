"""What hides a client: sums of which the server sees the result alone, and noise with its account."""
