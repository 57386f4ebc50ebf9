"""What the project costs, and whether its figures are true: ``python -m benchmarks`` measures speed, the scripts beside it the rest."""
