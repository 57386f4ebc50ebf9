"""The effect of a call, as values by the names that users know, the comparison of two effects, and stand-ins for values that nothing computed."""
