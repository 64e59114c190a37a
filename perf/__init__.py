"""Measures the ratios of docs/design.md §9: ``python -m perf``. What they mean is in docs/performance.md."""
