"""All nestings of one test: the sweep, the draws of hypothesis, and the exception that people see."""
