"""Watch mode: what the tests of a suite leave behind that nobody marked. Nothing here imports pytest."""
