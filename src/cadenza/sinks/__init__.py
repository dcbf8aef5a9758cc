"""Places for records."""
