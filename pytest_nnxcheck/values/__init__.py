"""What a call did, as values by the names that users know, and how two of them compare."""
