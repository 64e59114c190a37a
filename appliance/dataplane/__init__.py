"""dataplane of a node."""
