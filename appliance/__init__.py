"""The storage node: control service, namespaces and metadata, data plane.

Imports go one way: this package uses the shared vocabulary in ``forebay`` and, but for its S3 gateway, nothing of
``forebay.client``.
"""
