"""The commands that ask and steer runs: a module each, imported when it is used."""
