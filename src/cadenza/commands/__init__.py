"""The command line. Each command consists of a parser and a function."""
