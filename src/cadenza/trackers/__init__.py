"""What writes to trackers and other services. `cadenza.sinks` and `cadenza.callbacks` have the public names."""
