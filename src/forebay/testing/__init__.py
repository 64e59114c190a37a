"""What ships for tests: conformance suites that every implementation of an interface must pass, and seeded faults."""
