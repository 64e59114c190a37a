"""control of a node."""
