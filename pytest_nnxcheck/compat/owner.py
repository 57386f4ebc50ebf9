"""Whose code it is: the user's, of jax, of flax, of another package, of Python, of what runs the tests, or ours. It imports Python alone."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Literal

Owner = Literal["user", "jax", "flax", "installed", "python", "runner", "ours"]

PACKAGES: dict[str, Owner] = {
    # The standard library has a package named "test", and so have many users.
    **dict.fromkeys(sys.stdlib_module_names - {"test", "this", "antigravity"}, "python"),
    **dict.fromkeys(
        "numpy optax orbax chex einops jaxtyping ml_dtypes scipy etils absl typing_extensions".split(), "installed"
    ),
    # Of beartype a walk through one decorated method would open 3,000 objects, through one distribution of TensorFlow Probability 5,000,
    # through one layer of Keras 14,000, through a configuration of MaxText 12,000 functions of SymPy and 1,500 of Pydantic and Jinja, and hold none of the user's; TensorFlow Probability caches what its bijectors compute, tracers too, by keys that nobody else has.
    **dict.fromkeys("beartype typeguard tqdm pandas matplotlib torch tensorflow".split(), "installed"),
    **dict.fromkeys("tensorflow_probability distrax keras".split(), "installed"),
    **dict.fromkeys("sympy mpmath pydantic pydantic_core jinja2 yaml".split(), "installed"),
    **dict.fromkeys("hypothesis pytest _pytest pluggy xdist execnet".split(), "runner"),
    **dict.fromkeys(("jax", "jaxlib"), "jax"),
    "flax": "flax",
    "pytest_nnxcheck": "ours",
}
DEMO = "pytest_nnxcheck.demo"
"""The one module of ours that is code as the user's: it is checked."""
"""Top-level packages whose code is not the user's. Other installed packages are not here: users test them. An object of these packages
is opened if it holds state, such as a seed generator of Keras that a module keeps: see `openers.holds_state`."""


def owner(module: object) -> Owner:
    """The owner of a module, or of a part of it, by its dotted name; what is no name is the user's."""
    return PACKAGES.get(module.partition(".")[0], "user") if type(module) is str and module != DEMO else "user"


def is_library(module: object) -> bool:
    """True if a value is the name of a module that is not the user's."""
    return owner(module) != "user"


def of_frame(frame: FrameType) -> Owner:
    """The owner of the code of a frame."""
    return owner(frame.f_globals.get("__name__"))


def is_of_jax_or_flax(frame: FrameType) -> bool:
    """True if the code of a frame is of jax or flax."""
    return of_frame(frame) in ("jax", "flax")


@functools.cache
def of_file(file: str) -> Owner:
    """The owner of a file; generated code is Python's. Packages that `PACKAGES` only names are installed, as all others are."""
    if file.startswith("<"):
        return "python"
    if file.endswith(str(Path(*DEMO.split(".")).with_suffix(".py"))):
        return "user"
    for directory, whose in _directories():
        if file.startswith(directory):
            return whose
    if {"site-packages", "dist-packages"} & {*Path(file).parts}:
        return "installed"
    return "python" if file.startswith(str(Path(contextlib.__file__).parent) + os.sep) else "user"


@functools.cache
def _directories() -> tuple[tuple[str, Owner], ...]:
    """The directories of jax, flax, what runs the tests and ours, as far as they are imported."""
    named = ((sys.modules.get(name), whose) for name, whose in PACKAGES.items() if whose not in ("python", "installed"))
    # A plugin of pytest may be one file, `pluggy` is a package.
    packages = (
        (module.__file__, whose) for module, whose in named if module is not None and hasattr(module, "__path__")
    )
    return tuple((str(Path(file).parent) + os.sep, whose) for file, whose in packages if file)


REPLACING = tuple(
    str(Path("pytest_nnxcheck", *parts))
    for parts in (("compat", "graph.py"), ("compat", "staging.py"), ("subject", "copies.py"))
)
"""Our files with functions that replace those of jax and flax for a while: they are called inside of the user's call."""


def surrounds(file: str) -> bool:
    """True if a frame of this file is ours, and around the user's call: further out no line belongs to the call."""
    return of_file(file) == "ours" and not file.endswith(REPLACING)


def is_library_file(file: str) -> bool:
    """True if a file holds no line of the user's. Installed packages may be the user's."""
    return of_file(file) not in ("user", "installed")
