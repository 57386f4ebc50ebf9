"""Compiled programs: the buffers of their peak, and where the bytes come from."""
