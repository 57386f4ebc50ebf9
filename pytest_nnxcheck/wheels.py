"""The wheels with the compilers of TPUs and GPUs: a check that they are installed and fit, and the environment that they need.

Nothing here imports jax, which reads some of these variables as it is imported; libtpu reads the others as it is loaded.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Collection, Iterable, MutableMapping
from importlib import metadata
from pathlib import Path

from pytest_nnxcheck.core.chips import Compiler, parse_target
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.devices import set_variables

OLDEST = "0.5.3"
"""The oldest jax that targets were tried with. No version between it and 0.4.33 was."""
_MISSING = {
    "tpu": "needs the compiler of TPUs: pip install '.[tpu]' in a checkout of pytest-nnxcheck (0.6 GB, Linux on x86-64)",
    "cuda": "needs the compiler of NVIDIA GPUs: pip install '.[cuda]' in a checkout of pytest-nnxcheck (0.5 GB, Linux on x86-64)",
}
_CUDA_PAIRS = (("jax-cuda13-pjrt", "jax-cuda13-plugin"), ("jax-cuda12-pjrt", "jax-cuda12-plugin"))
"""In the order in which jax looks for them; it skips a pair of another version."""

_TPUS = ("accel[0-9]*", "vfio/[0-9]*")
_GPUS = ("nvidia[0-9]*", "dxg", "kfd")
"""Device files: of NVIDIA, of any GPU in Linux on Windows, and of AMD."""
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a cloud's metadata server, for minutes on jax 0.5.3
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any will do: without one libtpu prints a line as it is loaded
    "TPU_WORKER_HOSTNAMES": "localhost",  # and four lines without this one
    "TPU_LOG_DIR": "disabled",  # else it makes a folder of logs in the temporary folder
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else it refuses a second process, such as a worker of pytest-xdist
}
WITHOUT_GPU = {
    # jax 0.5 to 0.7 print a traceback and drop the plugin where NVIDIA's libraries are not installed. No compiler needs them.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
WITHOUT_BOTH = {
    "JAX_PLATFORMS": "cpu",  # else jax tries to start a GPU: a traceback of 29 lines without NVIDIA's libraries
}
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
"""jax sets it to 1, at which XLA warns of each program that sorts or is too large for a GPU, and jax 0.6 of a missing driver; 3 is silence."""


def problem(targets: Collection[str]) -> str:
    """Why one of the targets cannot be compiled for here, and what to install; empty if all can."""
    if not targets:
        return ""
    system, processor = _machine()
    if (system, processor) != ("Linux", "x86_64"):
        return (
            "the compilers of TPUs and NVIDIA GPUs come as wheels for Linux on x86-64 only, this is"
            f" {system.replace('Darwin', 'macOS')} on {processor}"
        )
    from packaging.version import Version  # late, as below: only who names a target pays for it

    if Version(version("jax")) < Version(OLDEST):
        return f"targets need jax {OLDEST} or newer, this is {version('jax')}: pip install 'jax>={OLDEST}'"
    problems = {"tpu": _problem_of_libtpu, "cuda": _problem_of_plugin}
    return next((f"{word} {why}" for word in targets if (why := problems[parse_target(word).chip.compiler]())), "")


def _problem_of_libtpu() -> str:
    from packaging.requirements import Requirement

    there = version("libtpu")
    if not there:
        return _MISSING["tpu"]
    of_jax = (Requirement(line) for line in metadata.requires("jax") or () if line.startswith("libtpu"))
    wanted = next((each.specifier for each in of_jax if each.name == "libtpu"), None)
    if wanted is None or wanted.contains(there, prereleases=True):
        return ""
    return f"needs the libtpu of jax {version('jax')}, this is {there}: pip install 'libtpu{wanted}'"


def _problem_of_plugin() -> str:
    from packaging.version import Version

    pairs = [pair for pair in _CUDA_PAIRS if all(map(version, pair))]
    if not pairs:
        return _MISSING["cuda"]
    jaxlib = version("jaxlib")
    # As jax compares them, which leaves out a plugin of another version: a suffix such as .dev1 does not count.
    others = [[name for name in pair if Version(version(name)).release != Version(jaxlib).release] for pair in pairs]
    if not all(others):
        return ""
    name, install = others[0][0], " ".join(f"'{name}=={jaxlib}'" for name in pairs[0])
    return f"needs the plugin of jaxlib {jaxlib}, {name} is {version(name)}: pip install {install}"


@functools.cache  # a process asks for each marker that names a target
def version(distribution: str) -> str:
    """The version of a distribution, empty where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def versions(compiler: Compiler) -> str:
    """The wheel of a compiler with its version, ``libtpu 0.0.50.1``; empty where there is none."""
    names = ("libtpu",) if compiler == "tpu" else tuple(pjrt for pjrt, _ in _CUDA_PAIRS)
    return next((f"{name} {there}" for name in names if (there := version(name))), "")


def prepare(environment: MutableMapping[str, str], targets: Collection[str]) -> Callable[[], None]:
    """Set the variables that the compilers of targets need, where the user has not. Returns a function that puts the environment back.

    Raises `SettingError` where nothing can be compiled for one of the targets.
    """
    if why := problem(targets):
        raise SettingError(why)
    changed = {}
    if targets:
        tpu, gpu = _has_device(_TPUS), _has_device(_GPUS)
        wanted = ({} if tpu else WITHOUT_TPU) | ({} if gpu else WITHOUT_GPU) | ({} if tpu or gpu else WITHOUT_BOTH)
        changed = {name: value for name, value in wanted.items() if not environment.get(name)}
        if environment.get(LOG_LEVEL, "1") == "1":
            changed[LOG_LEVEL] = "3"
    return set_variables(environment, changed)


def _machine() -> tuple[str, str]:
    return platform.system(), platform.machine()


def _has_device(patterns: Iterable[str]) -> bool:
    return any(path for pattern in patterns for path in Path("/dev").glob(pattern))
