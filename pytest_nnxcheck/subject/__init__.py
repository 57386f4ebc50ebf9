"""One call of the user's, taken apart: its graph nodes, its arrays, what it changes, and how values are written back."""
