"""One call under one nesting, from the order to the outcome: prepared, observed by `engine`, judged by `invariants`."""
