"""Python objects: where they hold tracers, their mutable places, and whether two of them are equal. Nothing here runs the code of the objects."""
