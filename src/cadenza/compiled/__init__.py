"""`Trainer(compile="step")`: a step as one compiled function. The core loads this where it is asked for."""
