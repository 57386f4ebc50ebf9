"""Other tools on the same programs, side by side: ``python -m benchmarks.comparison``. See docs/comparison.md."""
