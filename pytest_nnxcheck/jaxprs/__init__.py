"""Traced programs: what their equations hand through, and the same program without that."""
