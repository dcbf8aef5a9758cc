"""The base of adapters: events, views of a run, states, and readers of source. Public names are in `cadenza.compat`."""
