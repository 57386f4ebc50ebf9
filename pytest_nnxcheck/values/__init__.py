"""What a call did, as values by the names that users know, how two of them compare, and what stands in for values that nothing computed."""
