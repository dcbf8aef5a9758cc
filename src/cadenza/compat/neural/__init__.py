"""What both versions of NeMo share: the graph of neural modules, and how it is trained on the native trainer."""
