"""The same nestings without the plugin: its layers alone, with nothing around them that looks or judges.

The floor is a loop of trace, lower, compile and run, with the compiler's own options. By hand is what one writes without a plugin: a loop
over nestings in which the jitted call runs twice under `jax.checking_leaks`, its memory is read, and its buffers are compared.
What no check can do without is less than the floor: each nesting is traced, and each program that is new is lowered and compiled.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.compat.staging import compiler_options
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.subject.profile import Profile, profile
from pytest_nnxcheck.subject.subject import Subject, bind
from pytest_nnxcheck.transforms.compose import compose, stack_inputs

Jitted = Any
"""What `jax.jit` and `nnx.jit` return; flax has no name for its own."""


class NoGuards:
    """In the place of the plugin's guards: nothing is looked at."""

    def around(self, _layer: object, program: Callable[..., Any]) -> Callable[..., Any]:
        """The program as it is."""
        return program

    @contextlib.contextmanager
    def unchanged(self, _layer: object, _state: object) -> Iterator[None]:
        """Nothing noted."""
        yield


@dataclass
class Loop:
    """One way to run nestings, and what it counted: those that raised, the peaks it read, the buffers that moved."""

    raised: int = 0
    peaks: list[int] = field(default_factory=list)
    moved: int = 0
    donated: set[int] = field(default_factory=set)

    def run(self, subject: Subject, facts: Profile, nesting: Nesting) -> None:
        """Run one nesting on a fresh copy of the state. What it raises is counted."""
        guards: Any = NoGuards()
        self.donated = set()
        try:
            program = compose(subject, facts, nesting, guards, self.jit(nesting))
            state = subject.fresh()
            inputs = tuple(map(jnp.copy, stack_inputs(nesting, subject.inputs)))
            with self.around():
                self.start(nesting, program, state, inputs)
            self.compare(state)
        except Exception:  # noqa: BLE001 - a nesting that flax refuses costs what it costs
            self.raised += 1

    def start(self, nesting: Nesting, program: Callable[..., Any], state: Any, inputs: tuple[Any, ...]) -> None:
        """Run a program to its end."""
        del nesting
        jax.block_until_ready(program(state, *inputs))

    def jit(self, nesting: Nesting) -> Callable[..., Any]:
        """The jit of the outermost layer, with its state donated where it is an argument."""
        root = nesting.layers[0] if nesting.layers else None
        donates = root is not None and root.transform == "jit" and root.style in {"argument", "functional"}

        def apply(wrapper: Callable[..., Any], f: Callable[..., Any]) -> Callable[..., Any]:
            jitted = wrapper(f, donate_argnums=0) if donates else wrapper(f)
            return lambda *args: self.call(jitted, args, donates=donates)

        return apply

    def call(self, jitted: Jitted, args: tuple[Any, ...], *, donates: bool) -> Any:
        """Run the outermost jit."""
        del donates
        compiled = jitted.trace(*args).lower().compile()
        self.read(compiled)
        return compiled(*args)

    def read(self, compiled: Any) -> None:
        """Note the peak of a compiled program."""
        used = compiled.memory_analysis()
        bound = used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
        self.peaks.append(bound - used.alias_size_in_bytes)

    def around(self) -> contextlib.AbstractContextManager[None]:
        """What a program runs in."""
        return contextlib.nullcontext()

    def compare(self, state: Any) -> None:
        """Look at the buffers of the state afterwards: here nobody does."""


class CompiledError(Exception):
    """A program is compiled: it does not run."""


@dataclass
class Needed(Loop):
    """Traces, and programs lowered and compiled with the plugin's options, once each. Nothing runs and nothing is looked at."""

    texts: set[str] = field(default_factory=set)

    def start(self, nesting: Nesting, program: Callable[..., Any], state: Any, inputs: tuple[Any, ...]) -> None:
        """Compile a program with an outer jit, and trace any other."""
        if not nesting.layers or nesting.layers[0].transform != "jit":
            nnx.eval_shape(lambda state, inputs: program(state, *inputs), state, inputs)
            return
        with contextlib.suppress(CompiledError):
            program(state, *inputs)

    def call(self, jitted: Jitted, args: tuple[Any, ...], *, donates: bool) -> Any:
        """Compile the outermost jit, unless its text is known."""
        del donates
        lowered = jitted.trace(*args).lower()
        text = lowered.as_text()
        if text not in self.texts:
            self.texts.add(text)
            self.read(lowered.compile(compiler_options=compiler_options()))
        raise CompiledError


class Traced(Needed):
    """Traces and lowers the same, and compiles nothing: what a run cannot do without whose programs are all known."""

    def call(self, jitted: Jitted, args: tuple[Any, ...], *, donates: bool) -> Any:
        """Lower the outermost jit to a text."""
        del donates
        jitted.trace(*args).lower().as_text()
        raise CompiledError


class ByHand(Loop):
    """The loop of a careful user."""

    def call(self, jitted: Jitted, args: tuple[Any, ...], *, donates: bool) -> Any:
        """Run the outermost jit twice: the second call shows what the first one left."""
        if not donates:
            jitted(*args)
            return jitted(*args)
        self.donated = buffers(args[0])
        self.read(jitted.lower(*args).compile())
        if isinstance(args[0], nnx.State):  # the pure spelling: the first call may not take the buffers away
            jitted(jax.tree.map(jnp.copy, args[0]), *args[1:])
        else:
            jitted(*args)
        return jitted(*args)

    def around(self) -> contextlib.AbstractContextManager[None]:
        """Every program runs under jax's own check for leaks."""
        context: contextlib.AbstractContextManager[None] = jax.checking_leaks()
        return context

    def compare(self, state: Any) -> None:
        """Count the buffers that were donated and are not those of the state any more."""
        if self.donated:
            self.moved += len(self.donated - buffers(nnx.state(state)))


def buffers(tree: Any) -> set[int]:
    """The pointers of the arrays in a tree; keys have none."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return {leaf.unsafe_buffer_pointer() for leaf in leaves}


def run_all(loop: Loop, subject: Callable[..., Any], args: tuple[Any, ...], nestings: Sequence[str]) -> None:
    """Every nesting in turn; what the call does to its state is read once, as a user knows it."""
    bound = bind(subject, args, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts = profile(bound)
        for nesting in nestings:
            loop.run(bound, facts, Nesting.parse(nesting))
