"""What the tests of the compile cache share."""

import pytest

from pytest_nnxcheck.compat import compile_cache


@pytest.fixture
def no_folder_of_the_user(monkeypatch):
    """The tests have one, see tests/conftest.py: options and environment as jax has them, for a while."""
    usual = {"min_compile_time_secs": "1", "min_entry_size_bytes": "0"}
    for name, value in usual.items():
        monkeypatch.setenv(f"JAX_PERSISTENT_CACHE_{name.upper()}", value)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    with compile_cache._set({compile_cache.DIRECTORY: None}):
        yield
