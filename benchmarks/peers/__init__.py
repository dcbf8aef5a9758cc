"""What `benchmarks/peers.py` measures: one module for each framework, all with the same two functions."""
