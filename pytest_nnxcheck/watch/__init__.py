"""Watch mode: the leftovers of tests that nobody marked. Nothing here imports pytest."""
