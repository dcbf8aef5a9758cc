"""What a run knows of itself: counters, decisions, requests, state."""
