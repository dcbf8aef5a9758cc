"""Records, their history, and the run directory that holds them."""
