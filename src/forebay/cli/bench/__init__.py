"""`forebay bench`: the running node measured, with references beside it in the same run."""
