"""The parts of a program around the user's test: the layers, the nesting, and what runs a call under it and looks for what was found."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck.compat import sharding
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.engine.reference import MEANINGS, meaning_of
from pytest_nnxcheck.reproducer import checks, nesting_text, runtime
from pytest_nnxcheck.reproducer.assertions import Assertions, assertions
from pytest_nnxcheck.reproducer.nesting_text import Facts
from pytest_nnxcheck.reproducer.own_source import Place, bound_in, extract, globals_in, place, renamed
from pytest_nnxcheck.subject.abstract_arrays import abstract_state
from pytest_nnxcheck.transforms.layer import first, stack
from pytest_nnxcheck.transforms.mapping import on_mesh

OPENED, TARGET = (runtime.__name__, "OPENED"), (checks.__name__, "TARGET")
"""The tables of fields, and of a target, of which a program has its own."""
UNKNOWN = Facts((), {}, (), (), {}, 0, (), plain_output=False, partial=False, opened={}, abstract=False)


@dataclass(frozen=True)
class Form:
    """What stands around the user's test in a program: import lines, the layers, the nesting, and what runs and checks it."""

    imports: tuple[str, ...]
    layers: tuple[str, ...]
    nesting: tuple[str, ...]
    support: tuple[str, ...]


def form_of(
    outcome: Outcome | None, nesting: Nesting, settings: Settings, calls: tuple[Facts, ...], taken: frozenset[str]
) -> Form:
    """The parts of a program; ``taken`` are names that mean something else in it."""
    calls = calls or (UNKNOWN,)
    asked = assertions(outcome, nesting, calls[-1])
    layers = tuple(nesting_text.layers_of(nesting))
    ran = extract(layers, taken).definitions
    read = words_of_plans(layers, ran)
    nestings = "\n\n".join(
        nested_text(nesting, settings, facts, asked, read, f"nesting_{number}" if len(calls) > 1 else "nesting")
        for number, facts in enumerate(calls, 1)
    )
    wrapper = wrapper_text(nesting, calls, asked)
    needed = extract((*layers, *map(place, definitions(nesting, asked, nestings + "\n" + wrapper))), taken)
    used = globals_in(nestings)
    opened = {name: fields for call in calls for name, fields in call.opened.items()}
    aliases = needed.aliases | {name: f"{name}_" for name in bound_in(f"{nestings}\n{wrapper}") & taken}
    support = {name: text for name, text in needed.definitions.items() if name not in ran}
    for table, content in ((OPENED, opened), (TARGET, asked.target)):
        if table in support:
            support[table] = support[table].replace("{}", repr(content))
    return Form(
        imports=(*(f"import {name}" for name in ("contextlib", "types") if name in used), *needed.imports),
        layers=tuple(text for name, text in needed.definitions.items() if name in ran),
        nesting=(renamed(nestings, aliases),),
        support=(*support.values(), renamed(wrapper, aliases)),
    )


def words_of_plans(layers: tuple[Place, ...], ran: Mapping[Place, str]) -> dict[Place, list[str]]:
    """What each layer reads of its plan, itself or in a function that it hands that to."""
    own = {name: re.findall(r"\bplan\.(\w+)", text) for name, text in ran.items()}
    handed = {name for name, text in ran.items() if re.search(r"\bplan[,)]", text.partition(":\n")[2])}
    shared = [word for name in ran if name not in layers for word in own[name]]
    return {name: [*dict.fromkeys((*own[name], *(shared if name in handed else ())))] for name in ran}


def definitions(nesting: Nesting, asked: Assertions, text: str) -> list[Callable[..., Any]]:
    """Our functions that the text of a program names."""
    every = [*vars(runtime).values(), *vars(checks).values(), first, stack, on_mesh, abstract_state]
    every += [MEANINGS[name] for name in meaning_of(nesting) if asked.eager]
    names = globals_in(text)
    return [function for function in dict.fromkeys(filter(inspect.isfunction, every)) if function.__name__ in names]


# --- the nesting


def nested_text(
    nesting: Nesting,
    settings: Settings,
    facts: Facts,
    asked: Assertions,
    read: Mapping[Place, list[str]],
    name: str,
) -> str:
    """The function that puts the layers around a call: each has a plan of what its text reads."""
    lines, text = [f"def {name}(call):"], "call"
    for number, layer in reversed([*enumerate(nesting.layers)]):
        if nesting_text.is_registered(layer):
            text = f"registered({nesting_text.own_name(layer)}, {text})"
            continue
        jit = root_jit(nesting, settings, facts, asked) if number == 0 else PLAIN
        values = dict(
            facts.values[number], jit=jit, unchanged=asked.touched or "lambda state: contextlib.nullcontext()"
        )
        function = nesting_text.layer_name(layer)
        plan = ", ".join(f"{word}={values[word]}" for word in read[function])
        lines += [f"    plan_{number} = types.SimpleNamespace({plan})"] if plan else []
        text = f"{function[1]}({text}, {f'plan_{number}' if plan else None})"
    return "\n".join([*lines, f"    return {text}"])


def root_jit(nesting: Nesting, settings: Settings, facts: Facts, asked: Assertions) -> str:
    """The ``jit`` of the outermost layer."""
    states = nesting_text.root_of(nesting) or 0
    donated: tuple[int, ...] = (0,) if states and settings.donate != "none" else ()
    donated += tuple(states + number for number in facts.donated)
    options = f"keep_unused=True, donate_argnums={donated!r}" if donated and asked.donates else "keep_unused=True"
    if is_traced(nesting, facts, asked):
        return PLAIN
    show = "abstract_outputs" if facts.abstract else ""
    if asked.target:
        show = f"lambda *stage: compile_on_target(*stage) or {show}(*stage)" if show else "compile_on_target"
    elif asked.compiles and not show:
        show = "lambda compiled, *_: COMPILED.append(compiled)"
    return (
        f"lambda wrapper, f: staged(wrapper, f, {show}, {options})"
        if show
        else f"lambda wrapper, f: wrapper(f, {options})"
    )


PLAIN = "lambda wrapper, f: wrapper(f)"


# --- the call

WRAPPER = """def nnx_wrap(subject):
    def wrapped(*args, **kwargs):
        {lines}
        return rebuild({output})
    return wrapped"""


def wrapper_text(nesting: Nesting, calls: tuple[Facts, ...], asked: Assertions) -> str:
    """The function that stands for the fixture."""
    facts, several = calls[-1], len(calls) > 1
    run, output = run_text(nesting, facts, asked), nesting_text.un_nested(nesting, "output", abstract=facts.abstract)
    function = "function" if any(call.partial for call in calls) else "subject"
    pack = "arrays_of" if all(call.plain_output for call in calls) else "parts_of"
    if any(call.opened for call in calls):
        pack = f"lambda output, *states: emptied(output, {pack}(open_objects(output), *states))"
    ready = [*own_lines(nesting, facts, asked), *place_lines(nesting, facts)]
    lines = [*opening_lines(calls)]
    if several:
        lines += [f"names, nesting = CALLS[min(len(MADE), {len(calls) - 1})]", "MADE.append(subject)"]
    lines += [
        f"program, state, inputs, rebuild = take_apart({function}, args, kwargs, {'names' if several else repr(facts.names)}, {pack})"
    ]
    if several:
        early = nesting_text.un_nested(nesting, plain_run(nesting, facts, asked), abstract=facts.abstract)
        lines += [f"if len(MADE) < {len(calls)}:  # these hold", *(f"    {line}" for line in ready)]
        lines += [f"    return rebuild({early})"]
    lines += [*asked.first, *ready, *asked.before, f"output = {run}", *asked.after]
    text = WRAPPER.format(lines="\n        ".join(lines), output=output)
    if several:
        pairs = ", ".join(f"({call.names!r}, nesting_{number})" for number, call in enumerate(calls, 1))
        text = f"CALLS, MADE = [{pairs}], []\n\n{text}"
    return text


def opening_lines(calls: tuple[Facts, ...]) -> list[str]:
    """The lines for what jax cannot take apart."""
    lines = ["function, args, kwargs = unwrapped(subject, args, kwargs)"] if any(call.partial for call in calls) else []
    if any(call.opened for call in calls):
        lines += ["open_objects([getattr(subject, '__self__', subject), args, kwargs])"]
    return lines


def own_lines(nesting: Nesting, facts: Facts, asked: Assertions) -> list[str]:
    """The lines that give the run arrays of its own: the jit donates them."""
    if is_traced(nesting, facts, asked):
        return []
    if facts.abstract:
        on_mesh = sharding.active_mesh() is not None
        return ["nnx.update(state, abstract_state(nnx.state(state)))"] if on_mesh else []
    donates = asked.donates and not asked.viewed and nesting_text.root_of(nesting) is not None
    lines = ["nnx.update(state, jax.tree.map(jnp.copy, nnx.state(state)))"] if donates else []
    return [*lines, "inputs = list(map(jnp.array, inputs))"]


def place_lines(nesting: Nesting, facts: Facts) -> list[str]:
    """The lines that give the inputs their axes, and put state and inputs on a mesh."""
    stacked = "inputs = [stack_abstract(each) for each in inputs]" if facts.abstract else "inputs = stack(inputs)"
    lines = [stacked] * nesting_text.axes(nesting)
    if nesting_text.places(nesting):
        lines += ["nnx.update(state, on_mesh(nnx.state(state)))", "inputs = on_mesh(inputs)"]
    return lines


def run_text(nesting: Nesting, facts: Facts, asked: Assertions) -> str:
    """The run, and the search for tracers around it."""
    if not asked.leaked:
        return plain_run(nesting, facts, asked)
    if is_traced(nesting, facts, asked):
        look = f"lambda run, ours: leaves_no_tracers(run, {asked.leaked!a}, lambda: of_other_traces(living_tracers(), ours))"
        return f"traced(nesting(program), state, inputs, {look})"
    return f"leaves_no_tracers(lambda: nesting(program)(state, *inputs), {asked.leaked!a}, living_tracers)"


def plain_run(nesting: Nesting, facts: Facts, asked: Assertions) -> str:
    if is_traced(nesting, facts, asked):
        return "traced(nesting(program), state, inputs, lambda run, _: run())"
    return "nesting(program)(state, *inputs)"


def is_traced(nesting: Nesting, facts: Facts, asked: Assertions) -> bool:
    return facts.abstract and (asked.traced or not nesting_text.root_of(nesting))
