"""How sums are kept from the server, one a module."""
