"""Callbacks of Hugging Face's transformers."""
