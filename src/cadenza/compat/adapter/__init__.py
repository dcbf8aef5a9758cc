"""Callbacks of Hugging Face, Lightning and Keras in the list of a native trainer. `cadenza.compat` has the public names."""
