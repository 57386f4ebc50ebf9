"""What is there: Python objects and where they hold tracers, compiled programs and where their bytes are."""
