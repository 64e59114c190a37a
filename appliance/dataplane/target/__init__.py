"""The embedded NVMe/TCP target: a process of its own that serves file volumes to NVMe hosts."""
