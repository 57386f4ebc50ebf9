"""Checks of classes and functions that the command line names, where no test is written: ``pytest --nnx-check package.models:Block``."""
