"""`forebay doctor`: what keeps a node or a client from working well here, and what to do about it."""
