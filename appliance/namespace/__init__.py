"""namespace of a node."""
