"""The commands about past steps."""
