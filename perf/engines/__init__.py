"""What vLLM gets from Forebay: comparisons that run the engine's own code, or models of what it would run on."""
