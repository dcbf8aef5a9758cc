"""The parts of NeMo 0.10 and 0.11 in common: the graph of neural modules, and its training on the native trainer."""
