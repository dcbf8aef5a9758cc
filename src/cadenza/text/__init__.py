"""What errors advise: the names of other trainers, likely cures of errors of torch, and how an error finds them."""
