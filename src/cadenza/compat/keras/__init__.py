"""For users of Keras."""
