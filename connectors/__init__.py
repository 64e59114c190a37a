"""Connectors: each translates one engine's calls to the client library, and does nothing else.

Imports go one way: this package uses the client and the shared vocabulary in ``forebay``, and nothing of
``forebay.appliance``. An engine is imported by its own subpackage only.
"""
