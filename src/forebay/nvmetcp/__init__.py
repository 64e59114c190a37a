"""NVMe/TCP without sockets: wire structures, PDUs, commands, and one connection state machine for both ends."""
