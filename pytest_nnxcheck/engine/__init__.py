"""One call under one nesting: prepared, run or traced, judged, and explained where it broke."""
