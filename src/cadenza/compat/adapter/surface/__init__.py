"""What a callback class of another system uses, read from its source: without a run, and without an instance."""
