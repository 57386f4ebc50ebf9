"""NNX programs compiled for chips that are not there: ``python -m benchmarks targets`` and ``mistral_targets``. See docs/targets.md."""
