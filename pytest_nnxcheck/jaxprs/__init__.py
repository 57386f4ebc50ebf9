"""Traced programs: how values flow in them, and the same program without copies."""
