"""Optimizers, precision, learning rates, averages of weights, and checks of finite numbers."""
