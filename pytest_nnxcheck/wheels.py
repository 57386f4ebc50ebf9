"""Stub until the other branch is merged."""

from importlib.metadata import version


def versions(compiler: str) -> str:
    name = "libtpu" if compiler == "tpu" else "jax-cuda12-pjrt"
    return f"{name} {version(name)}"
