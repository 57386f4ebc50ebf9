"""The layers that a nesting is made of, how they are put together, and which of them a call fits."""
