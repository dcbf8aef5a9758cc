"""The listings are scripts. The tests run them and do not import them."""

collect_ignore = ["listings"]
