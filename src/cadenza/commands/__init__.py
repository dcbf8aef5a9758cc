"""The command line: each command is a parser and a function."""
