"""`forebay top`: a node at work, live."""
