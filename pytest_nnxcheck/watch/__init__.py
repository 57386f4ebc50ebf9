"""Watch mode: what a test of a suite leaves behind that nobody marked. Nothing here knows pytest."""
