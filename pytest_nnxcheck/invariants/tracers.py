"""No tracers remain in the state, the module, the code of the subject, or anything reachable from them."""

from __future__ import annotations

from pytest_nnxcheck import compat
from pytest_nnxcheck.nesting import FURTHER, TRANSFORMS, Layer
from pytest_nnxcheck.observe import Leak, Observation
from pytest_nnxcheck.verdicts import Violation

SHOWN = 6


def tracers(observation: Observation) -> tuple[Violation, ...]:
    """Violations for tracers that outlived their trace, and for a state that ``eval_shape`` touched."""
    leaks = remaining(observation)
    if leaks:
        return (residue(leaks),)
    if observation.mutated:
        return (touched(observation.mutated),)
    return ()


def remaining(observation: Observation) -> tuple[Leak, ...]:
    """Leaks that survive the program, or that killed it; those that died with an inner module are no violation."""
    if observation.leaks or not compat.is_tracer_error(observation.error):
        return observation.leaks
    return observation.dropped


def residue(leaks: tuple[Leak, ...]) -> Violation:
    details = []
    for leak in leaks[:SHOWN]:
        details.append(("leaked", f"{leak.path}   {leak.holder} {leak.type}   <- {leak.kind}"))
        if leak.line:
            details.append(("", f"created at {leak.line}"))
    if len(leaks) > SHOWN:
        details.append(("", f"and {len(leaks) - SHOWN} more"))
    blamed = leaks[0].layer
    details.append(("left by", str(blamed) if blamed else "the call itself, un-nested"))
    paths = ", ".join(leak.path for leak in leaks[:2])
    return Violation("tracers", f"tracers remain in {paths}", tuple(details), advice(leaks[0]))


def touched(mutated: tuple[tuple[Layer, str], ...]) -> Violation:
    """eval_shape only asks for shapes: whatever it changes in the state was not meant."""
    rows = tuple(("changed", path) for _, path in mutated[:SHOWN])
    return Violation("tracers", f"eval_shape changed {mutated[0][1]}", (*rows, ("left by", str(mutated[0][0]))))


def advice(leak: Leak) -> str:
    """Advice that is true whatever the module: a closure is cured by handing the module in, a plain attribute by a Variable."""
    if leak.layer and leak.layer.captures:
        return carry_advice(leak.layer)
    if leak.holder in ("attribute", "list", "dict"):
        return f"keep the value in an nnx.Variable: {leak.path} is a plain Python {leak.holder}, which no transform carries out"
    if leak.holder in ("cache", "global", "class attribute", "default argument", "closure"):
        return f"do not keep arrays made under a transform in a {leak.holder}: it outlives the trace"
    return ""


def carry_advice(layer: Layer) -> str:
    """How to hand the module to a transform that captured it."""
    spelled = {
        "while_loop": "pass the module in the loop's carry: nnx.while_loop(cond, body, (model, x))",
        "fori_loop": "pass the module in the loop's carry: nnx.fori_loop(0, n, body, (model, x))",
        "scan": "pass the module in the scan's carry: nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, xs)",
        "cond": "pass the module as an operand: nnx.cond(pred, f, g, model, x)",
        "switch": "pass the module as an operand: nnx.switch(index, branches, model, x)",
        "shard_map": "pass the state of nnx.split to jax.shard_map, with nnx.merge in its body",
    }
    known = layer.transform in (*TRANSFORMS, *FURTHER)
    plain = f"pass the module as an argument: nnx.{layer.transform}(f)(model, x)"
    return spelled.get(
        layer.transform, plain if known else f"{layer.transform} should hand the module on as an argument of f"
    )
