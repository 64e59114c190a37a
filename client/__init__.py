"""The client library: sessions, transports and buffers, for engines and for the command line.

Imports go one way: this package uses the shared vocabulary in ``forebay`` and nothing of ``forebay.appliance``.
"""
