"""The control protocol: generated messages, service stubs, and the columns they carry."""
