"""The pytest plugin. Beside it only `named` knows pytest.

PYTEST_DONT_REWRITE: nothing here is an assertion for pytest to rewrite.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class PlainImports:
    """Finds the package's modules as Python's own importer does.

    The importer of pytest, which rewrites assertions, takes every module of an installed plugin for itself, and reads its bytecode object
    by object from the file: half of the time that this plugin would cost a suite without marked tests.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module of this package; `None` for any other."""
        package = __name__.partition(".")[0]
        return PathFinder.find_spec(name, path, target) if name.startswith(f"{package}.") else None


sys.meta_path.insert(0, PlainImports)
