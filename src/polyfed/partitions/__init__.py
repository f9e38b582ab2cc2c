"""How a data set is divided among clients."""
