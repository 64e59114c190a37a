"""Clients of other stores that need an interpreter or an environment of their own: processes that do slots of work."""
