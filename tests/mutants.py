"""Mutants: the code broken on purpose, one place at a time. A test must fail for each; run by ``nox -s mutants``.

Run from a checkout: ``python tests/mutants.py [NUMBER ...]``. Each is made in a copy of the package, which the tests import in place of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file of the package, the text to break in it, what stands there instead, and the tests of which one must fail."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    # core
    Mutant("core/catalogue.py", 'Transform("scan", default=True, means="carry", axis="steps",', 'Transform("scan", default=True, means="carry",', "test_house.py test_compose.py"),
    Mutant("core/catalogue.py", 'Transform("while_loop", default=True, means="repeat", loop="uncounted"', 'Transform("while_loop", default=True, means="repeat", loop="counted"', "test_nesting.py"),
    Mutant("core/nesting.py", "if row.excludes_itself and row in outer:", "if False:", "test_nesting.py test_house.py"),
    Mutant("core/nesting.py", "(*layer_names(), UN_NESTED)", "layer_names()", "test_nesting.py"),
    Mutant("core/setting_values.py", "if not names or not names[0].isidentifier():", "if True:", "test_settings.py"),
    Mutant("core/setting_values.py", '"" if UNITS[unit] % 1000 else written', '""', "test_settings.py"),
    Mutant("core/setting_values.py", "raise SettingError(f\"{error} ('state,NAME' donates an argument too)\") from None", "raise", "test_settings.py"),
    Mutant("core/expected_failures.py", "compiled or not any(row.compiled for row in rows_of([self.invariant]))", "True", "test_expected_failures.py"),
    Mutant("core/expected_failures.py", "elif not layer.row.idle:", "elif True:", "test_expected_failures.py"),
    Mutant("core/settings.py", '"selects_nestings": True, "narrows": True', '"selects_nestings": True', "test_baseline_run.py"),
    Mutant("core/settings.py", "and {place} <= {None, *row.places}", "", "test_settings.py"),
    # compat
    Mutant("compat/graph.py", "device=in_type(shape)", "device=None", "test_sharded.py"),
    Mutant("compat/arrays.py", "sharding.num_devices > 1", "len(sharding.device_set) > 1", "test_sharded.py"),
    Mutant("compat/arrays.py", "and not array.committed", "", "test_arrays.py"),
    Mutant("compat/graph.py", "return isinstance(error, classes) or is_slice", "return is_slice", "test_hints.py"),
    Mutant("compat/frames.py", " or not raises", "", "test_faults_of_jax.py"),
    Mutant("compat/frames.py", "in _LIBRARIES or not raises", "not in ()", "test_faults_of_jax.py"),
    Mutant("compat/graph.py", "return isinstance(error, classes) or is_slice", "return isinstance(error, classes)", "test_hints.py"),
    Mutant("compat/variables.py", 'file.startswith(("<", *packages))', "file.startswith('<')", "test_memory_breakdown.py test_memory_lines.py"),
    # inspection
    Mutant("inspection/raw_access.py", '_MAKERS = {"abc", "types"}', "_MAKERS = set()", "test_walk_code.py"),
    Mutant("inspection/walk.py", "visit.passing = True", "visit.passing = False", "test_walk_exceptions.py"),
    Mutant("inspection/walk.py", "if not finds(seen):", "if True:", "test_garbage.py"),
    Mutant("inspection/walk.py", " or tuple(sys.modules.values()) != self.modules", "", "test_walk_since.py"),
    Mutant("inspection/walk.py", "in self.fleeting:", "in ():", "test_walk_since.py"),
    Mutant("inspection/walk.py", "if later is not None and not any(map(matters, later.tracers)):", "if False:", "test_walk_since.py"),
    Mutant("inspection/open_code.py", "    visit.fleeting.append((open_traceback, traceback, name))\n", "", "test_walk_since.py test_walk_exceptions.py"),
    Mutant("inspection/raw_access.py", "    except ValueError:\n        return MISSING", "    except LookupError:\n        return MISSING", "test_subject.py test_walk.py"),
    Mutant("inspection/walk.py", "changed is MISSING or ", "", "test_walk_since.py"),
    Mutant("inspection/snapshot.py", '"__dict__", "__code__")', '"__dict__")', "test_walk_since.py"),
    Mutant("inspection/snapshot.py", "if type(value) is not cls:", "if False:", "test_walk_since.py"),
    Mutant("inspection/snapshot.py", "() if mro(cls) is bases else mro(cls)", "", "test_walk_since.py"),
    Mutant("inspection/snapshot.py", "return () if now is content else (now,)", "return ()", "test_walk_code.py"),
    Mutant("inspection/snapshot.py", "return changed if own is None else (*changed, ", "return () if own is None else (*(), ", "test_walk_data.py"),
    Mutant("inspection/open_data.py", "id(list): open_list,\n", "", "test_walk_data.py test_walk.py"),
    Mutant("inspection/open_data.py", "if key in stored.cached", "if stored.cached", "test_cached_property.py"),
    Mutant("inspection/raw_access.py", "functools.cached_property in mro(type(item))", "False", "test_cached_property.py"),
    Mutant("inspection/open_data.py", " or cls in _OPEN_CLASSES", "", "test_walk_data.py"),
    Mutant("watch/calls.py", 'getattr(sys.modules.get("flax.nnx"), "Module", None)', 'sys.modules["flax.nnx"].Module if "flax.nnx" in sys.modules else None', "test_settings_before_jax.py"),
    Mutant("inspection/pointers.py", "return not before.sharding.is_equivalent_to", "return before.sharding.is_equivalent_to", "test_sharded.py"),
    Mutant("inspection/origins.py", "if updated and instruction.opcode in UPDATES", "if False", "test_carried_copies.py"),
    Mutant("invariants/advice.py", "if max(held.bytes for held in made) >", "if size_of(made) >", "test_advice.py"),
    Mutant("invariants/memory.py", "any(not copy.updated for copy in copies)", "copies", "test_carried_copies.py"),
    Mutant("inspection/buffers.py", "if buffer.whole and len(buffer.parameters) == 1", "if len(buffer.parameters) == 1", "test_buffers.py"),
    Mutant("inspection/origins.py", "or shape.bits > of_parameter.bits", "or True", "test_wire_format.py"),
    Mutant("inspection/buffers.py", "return parameters if all(self._shape(parameter).dtype == shape.dtype for parameter in parameters) else ()", "return parameters", "test_budget.py"),
    Mutant("invariants/memory.py", " and not SLICED & {*copy.through}", "", "test_budget.py"),
    Mutant("inspection/buffers.py", "return repeated.elements * FEWER <= self.module.shape(value).elements", "return True", "test_budget.py"),
    Mutant("inspection/pointers.py", "if set(lost.pointers) <= held:", "if False:", "test_donated_structures.py test_donation.py"),
    # subject
    Mutant("subject/profile.py", "for one, other in pairs if one != other)", "for one, other in pairs)", "test_donated_inside.py"),
    Mutant("engine/cases.py", "and profile.in_one_array and donates:", "and profile.in_one_array:", "test_donated_inside.py"),
    Mutant("subject/write_back.py", "elif has_arrays(held) and has_arrays(value):", "elif False:", "test_subject.py"),
    Mutant("subject/write_back.py", " if not isinstance(held, set | frozenset) else ()", "", "test_subject.py"),
    Mutant("invariants/memory.py", "or wasted(advised)", "or wasted(())", "test_advice.py"),
    Mutant("inspection/pointers.py", "bisect_right(ends, start)", "bisect_left(starts, start)", "test_notes.py"),
    Mutant("reproducer/assertions.py", " and not (wasted and all(wasted))", "", "test_reproducer_files.py"),
    Mutant("engine/memo.py", "bool(self.graphdef == other.graphdef)", "True", "test_subject.py"),
    Mutant("transforms/fitness.py", "if len(profile.out) > len(subject.input_names):", "if len(profile.out) > len(subject.inputs):", "test_feedback.py"),
    Mutant("core/expected_failures.py", "style if style in styles else styles[0]", "style", "test_strategies.py"),
    Mutant("runner/strategies.py", "len(nesting) - nesting.layers[0].row.compiles", "len(nesting)", "test_strategies.py"),
    Mutant("plugin/hooks.py", ' and getattr(test, "outcome", "") != "rerun"', "", "test_plugin.py"),
    Mutant("reporting/tally.py", "seconds = old.seconds + new.seconds", "seconds = new.seconds", "test_wording.py"),
    Mutant("subject/bind.py", "            refuse_hijax(label, variables)\n", "", "test_bad_input.py"),
    Mutant("subject/bind.py", "            self.values += [compat.variable_value(variable) for _, variable in variables]\n", "", "test_abstract.py"),
    Mutant("subject/subject.py", "if wanted and first in names:", "if False:", "test_donation.py"),
    Mutant("subject/write_back.py", "if path in values and not real:", "if path in values:", "test_abstract.py"),
    Mutant("subject/write_back.py", "elif own or copied:", "elif False:", "test_subject.py"),
    Mutant("subject/subject.py", "*self.static, ", "", "test_leaky.py"),
    Mutant("subject/captured_constants.py", "if not is_filled(const)", "if True", "test_memory_lines.py"),
    Mutant("subject/captured_constants.py", "min(elements, const.size)", "const.size", "test_memory_lines.py"),
    Mutant("subject/jaxpr_flow.py", "return number != 0", "return False", "test_dataflow.py"),
    Mutant("subject/jaxpr_flow.py", "return not {*old} & {*map(id, jaxpr.outvars)}", "return True", "test_dataflow.py"),
    Mutant("invariants/memory.py", "for number in copy.parameters} <= leaves)", "for number in copy.parameters})", "test_carried_copies.py test_reports.py"),
    Mutant("subject/captured_constants.py", "and is_cut(eqn) and all(same[1:])", "and is_cut(eqn)", "test_memory_lines.py"),
    Mutant("subject/captured_constants.py", "everything[: compat.scan_layout(eqn)[0]]", "everything", "test_memory_lines.py"),
    Mutant("subject/profile.py", "describe(as_array(leaf) if isinstance(leaf, NUMBERS) else leaf)", "describe(leaf)", "test_subject.py"),
    Mutant("engine/check_call.py", "    jax.clear_caches()\n    observation = run_once(call, profile)\n", "    observation = run_once(call, profile)\n", "test_subject.py"),
    Mutant("engine/check_call.py", "if bound.name in call.memo.own_jits:", "if False:", "test_subject.py"),
    Mutant("engine/memo.py", "graph = tuple((path, fingerprint(value)) for", "graph = tuple(path for", "test_subject.py"),
    Mutant("subject/profile.py", "if paths & changed or shapes & {leaf.shape for leaf in out}:", "if paths & changed:", "test_training.py"),
    Mutant("subject/profile.py", 'if (*path, "step") in changed]', "]", "test_training.py"),
    Mutant("subject/jaxpr_flow.py", "COND: of_cond}", "}", "test_dataflow.py"),
    Mutant("subject/signatures.py", "call.__signature__ =", "_ =", "test_abstract.py test_compose.py test_check_call.py"),
    # transforms
    Mutant("subject/profile.py", "            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=compat.in_type(leaf))", "            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)", "test_sharded.py"),
    Mutant("transforms/compose.py", "sharding=compat.in_type(leaf, len(axes))", "sharding=None", "test_sharded.py"),
    Mutant("transforms/fitness.py", "if cut != other:", "if False:", "test_sharded.py"),
    Mutant("transforms/loops.py", "return state, f(state, *inputs)", "return state, f(nnx.clone(state), *inputs)", "test_compose.py test_parity.py"),
    Mutant("transforms/fitness.py", "layer.row.fixes_state and profile.added", "False and profile.added", "test_wild.py"),
    Mutant("transforms/fitness.py", "if profile.replaced and", "if False and", "test_wild.py"),
    Mutant("transforms/compose.py", "if layer.row.axis:\n            inputs", "if False:\n            inputs", "test_compose.py"),
    Mutant("transforms/compose.py", "trace_of(leak) not in alive", "trace_of(leak) in alive", "test_leaky.py"),
    Mutant("transforms/compose.py", "in profile.changed | profile.restored,", "in profile.changed,", "test_mapped.py"),
    Mutant("transforms/iteration.py", "return *out, *inputs[len(out) :]", "return inputs", "test_feedback.py"),
    # invariants
    Mutant("invariants/memory.py", "if used.peak > bound.budget:", "if used.peak > 2 * bound.budget:", "test_budget.py test_findings.py"),
    Mutant("invariants/memory.py", "if bound.default and too_many(size, profile):", "if False:", "test_reports.py test_memory_breakdown.py"),
    Mutant("invariants/memory.py", "if copy not in excused)", "if True)", "test_budget.py"),
    Mutant("invariants/memory.py", "and copy.inserted and not SLICED", "and not SLICED", "test_budget.py"),
    Mutant("invariants/donation.py", 'return "dtype" if old.dtype != new.dtype', 'return "dtype" if old.dtype == new.dtype', "test_findings.py"),
    Mutant("invariants/bound.py", "axes=axes, written=budget.written", "axes=axes", "test_budget.py"),
    Mutant("invariants/donation.py", "if {one, two} <= donated or", "if", "test_findings.py"),
    Mutant("invariants/donation.py", "and not others & case.written.renewed", "", "test_donated_inside.py"),
    Mutant("inspection/pointers.py", "left.get(name) is array or id", "id", "test_donated_inside.py"),
    Mutant("inspection/pointers.py", "for name, other in holders if name != other", "for name, other in holders if False", "test_donated_inside.py"),
    Mutant("invariants/tracers.py", "if observation.leaks or not compat.is_tracer_error", "if not compat.is_tracer_error", "test_findings.py"),
    Mutant("invariants/bound.py", "budget.bytes + axes, axes=axes", "budget.bytes, axes=axes", "test_budget.py"),
    Mutant("invariants/bound.py", "return max(broadcasts(observation.memory) - broadcasts(baseline), 0)", "return 0", "test_budget.py"),
    Mutant("invariants/donation.py", "if before.type != after.type and (where", "if False and (where", "test_donation.py"),
    Mutant("invariants/parity.py", "isinstance(value, np.ndarray | np.generic)", "False", "test_parity_values.py test_parity.py"),
    Mutant("invariants/parity.py", "if is_scalar(leaf.value) and path in before", "if False and path in before", "test_parity_values.py test_parity.py"),
    Mutant("invariants/advice.py", "(leaf.widens or leaf.looped)", "True", "test_advice.py"),
    Mutant("invariants/advice.py", "if leaves >= {held.name, *held.joined}:", "if True:", "test_advice.py"),
    Mutant("inspection/buffers.py", 'if len(parameters) == 1 and "concatenate" in here.operations:', "if False:", "test_buffers.py"),
    Mutant("invariants/advice.py", "if line not in lines]", "]", "test_advice.py"),
    # engine
    Mutant("engine/example.py", "from_eval_shape if subject.abstract else", "", "test_bad_input.py"),
    Mutant("engine/reference.py", "if not apart and (donated", "if False and (donated", "test_parity_reference.py"),
    Mutant("engine/reference.py", "state, tuple(map(copy_leaf, inputs)))", "state, inputs)", "test_parity_reference.py"),
    Mutant("subject/state_facts.py", "UNCHANGED if kept is None else kept.value", "UNCHANGED", "test_parity_reference.py"),
    Mutant("compat/arrays.py", "return jnp.array(leaf,", "return jnp.asarray(leaf,", "test_parity_reference.py"),
    Mutant("engine/reference.py", "len(self.steps) >= calls", "True", "test_parity_reference.py"),
    Mutant("engine/reference.py", "return Place(state.calls)", "return state", "test_parity_reference.py"),
    Mutant("engine/parity.py", "return [path for path in missing if path not in before.leaves]", "return []", "test_parity_reference.py test_parity.py"),
    Mutant("engine/example.py", "bool(first is value or first == value)", "pass", "test_bad_input.py"),
    Mutant("engine/memo.py", "__tracebackhide__ = True", "__tracebackhide__ = False", "test_check_call.py"),
    Mutant("engine/cases.py", "recall(self.memo.captured, self.key, lambda: causes.captured(self.subject))", "causes.captured(self.subject)", "test_neighbours.py"),
    Mutant("engine/causes.py", "    if compat.is_graph_node(function):\n        names", "    if False:\n        names", "test_neighbours.py"),
    Mutant("engine/causes.py", "if not any(other.transform.endswith(name) for other in same):", "if True:", "test_neighbours.py"),
    Mutant("engine/causes.py", "if compat.is_pinned(variable)]", "]", "test_neighbours.py"),
    Mutant("engine/check_call.py", " if is_refusal else ())", " if False else ())", "test_captured_modules.py"),
    Mutant("engine/causes.py", "    return tuple(captures)[:SHOWN]", "    return tuple(captures)[:SHOWN] or captured_by_call(subject)", "test_captured_modules.py"),
    Mutant("engine/causes.py", ' if step.opname == "LOAD_GLOBAL"}', "}", "test_captured_modules.py"),
    Mutant("engine/causes.py", "{**names, **closure_of(function)}", "{**closure_of(function)}", "test_captured_modules.py"),
    Mutant("engine/observe.py", "if tracers or (error and nesting.layers):", "if tracers:", "test_captured_modules.py"),
    Mutant("subject/subject.py", "if leaked or not ended:", "if leaked:", "test_captured_modules.py"),
    Mutant("engine/causes.py", "return tuple(pinned) or leaks", "return leaks", "test_neighbours.py"),
    Mutant("engine/causes.py", "(later or other.line == where)", "other.line == where", "test_neighbours.py"),
    Mutant("engine/causes.py", '.get("__wrapped__")', '.get("")', "test_neighbours.py"),
    Mutant("engine/parity.py", "TransparentReference((), wanted", "Reference((), wanted", "test_dropped_updates.py"),
    Mutant("engine/dropped_updates.py", "(all(kept) or left.transform in frames.BRANCHES)", "all(kept)", "test_dropped_updates.py"),
    Mutant("compat/compilation.py", '"xla_allow_excess_precision": False', '"xla_allow_excess_precision": True', "test_parity_values.py"),
    Mutant("engine/parity.py", " or (difference.elements > 0 and difference.allowed is None)", "", "test_parity_values.py"),
    Mutant("engine/parity.py", "and difference.allowed is None)", ")", "test_parity_values.py"),
    Mutant("reporting/hints.py", '"bool", "NoneType")', '"bool")', "test_recompilation.py"),
    Mutant("compat/shared_programs.py", "tuple(map(id, getattr", "tuple(map(type, getattr", "test_settings_before_jax.py"),
    Mutant("engine/causes.py", 'transform_of(above).startswith("jax.") or', "", "test_captured_modules.py"),
    Mutant("engine/causes.py", "isinstance(function, functools.partial)", "()", "test_captured_modules.py"),
    Mutant("engine/causes.py", '{"func": function.func} if', "{} if", "test_captured_modules.py"),
    Mutant("compat/frames.py", ' "checkify",', "", "test_hints.py"),
    Mutant("engine/causes.py", " or jits_by_itself(above)", "", "test_captured_modules.py"),
    Mutant("reporting/hints.py", "if elements(new) > elements(old):", "if True:", "test_donation.py"),
    Mutant("compat/frames.py", 'return MAP if ".control_flow" in str', 'return "" if ".control_flow" in str', "test_hints.py"),
    Mutant("compat/frames.py", 'f"{name}.__call__": name for', "name: name for", "test_hints.py"),
    Mutant("compat/frames.py", "    *DERIVATIVES,\n", "", "test_hints.py"),
    Mutant("engine/causes.py", "elif isinstance(held, list | tuple | dict):", "elif isinstance(held, list | dict):", "test_neighbours.py"),
    Mutant("engine/causes.py", "elif not isinstance(held, type | ModuleType):", "elif False:", "test_neighbours.py"),
    Mutant("engine/check_call.py", "if judgement.violations and observation.shared:", "if False:", "test_findings.py"),
    Mutant("engine/cases.py", "            if left:\n                raise Unrestored", "            if False:\n                raise Unrestored", "test_generators.py"),
    Mutant("engine/check_call.py", "if (bound.name, bound.code) in example.memo.unrestored:", "if False:", "test_generators.py"),
    Mutant("engine/check_call.py", "    publish(CallStarted(subject, UNKNOWN, nesting, settings))\n", "", "test_generators.py"),
    Mutant("engine/check_call.py", "        transparent_call = call.transparent_call()\n        observation = run(call, UNKNOWN)\n", "        observation = run(call, UNKNOWN)\n        transparent_call = call.transparent_call()\n", "test_parity.py"),
    Mutant("engine/memo.py", "if key not in table:", "if True:", "test_check_call.py"),
    Mutant("engine/example.py", "lost = self.places.pop().restore()", "lost = (self.places.pop(), ())[1]", "test_check_call.py"),
    Mutant("compat/arrays.py", "if not isinstance(leaf, (*NUMBERS, np.ndarray, np.generic)):", "if True:", "test_parity.py"),
    Mutant("invariants/parity.py", "or wanted[path] != got[path]:", "or True:", "test_parity.py"),
    Mutant("engine/observe.py", "keep_unused=True,", "keep_unused=False,", "test_findings.py"),
    Mutant("engine/traced.py", "or facts.calls_back", "", "test_values.py"),
    Mutant("engine/observe.py", "same = (path for path in profile.changed if", "same = (path for path in () if", "test_writes.py"),
    Mutant("engine/example.py", "if compat.is_pinned(variable)", "if False", "test_writes.py"),
    Mutant("engine/example.py", "[] if seen.complete else", "[] if True else", "test_notes.py"),
    Mutant("engine/example.py", "if not mapped:", "if True:", "test_notes.py"),
    Mutant("inspection/origins.py", 'instruction.opcode == "copy" and at_barrier', "False", "test_carried_copies.py"),
    Mutant("invariants/bound.py", "profile.devices == 1 or", "profile.devices > 0 or", "test_sharded.py"),
    Mutant("subject/uncomputed.py", "_TOOL_IDS = (3, 4, 5, 2, 1)", "_TOOL_IDS = (0, 3, 4, 5, 2, 1)", "test_values.py"),
    Mutant("plugin/hooks.py", "    if has_ended(item, report):", "    if report.when == 'call':", "test_report_files.py"),
    Mutant("plugin/marker.py", "or [*map(id, marks)] != [*map(id, read)]", "", "test_plugin_collection.py"),
    Mutant("watch/candidates.py", "if _is_builtin(_meaning(node.func, self.names)):", "if False:", "test_mark_candidates.py"),
    Mutant("invariants/memory.py", "            computed[types[leaf]] -= 1\n", "", "test_modes_of_models.py"),
    Mutant("invariants/donation.py", "and displaced(before, after, old)", "and False", "test_modes_of_models.py"),
    Mutant("inspection/snapshot.py", "if _in_objects(array, saved) or", "if True or", "test_notes.py"),
    Mutant("engine/parity.py", "precision if precision > FLOAT32 else 0.0", "0.0", "test_parity_values.py"),
    Mutant("invariants/memory.py", "of_leaves(case, copies, case.written.remade)", "()", "test_carried_copies.py"),
    Mutant("subject/jaxpr_flow.py", "(eqn.primitive.name in UPDATES and 0 in numbers)", "False", "test_dataflow.py"),
    Mutant("subject/jaxpr_flow.py", "any(id(var) in made for var in eqn.invars) or (outputs", "(outputs", "test_dataflow.py"),
    Mutant("subject/jaxpr_flow.py", "for k in numbers for out in outputs):", "for k in () for out in outputs):", "test_dataflow.py"),
    Mutant("subject/jaxpr_flow.py", "            ids.add(id(var))\n", "", "test_dataflow.py"),
    Mutant("subject/waste.py", "if not jnp.issubdtype(before, jnp.inexact) or", "if", "test_advice.py"),
    Mutant("invariants/parity.py", "RELATIVE.get(min(width, computed), RELATIVE[HALF]) * moved", "RELATIVE[HALF] * moved", "test_parity_reference.py"),
    Mutant("engine/parity.py", "if list(map(np.shape, arrays)) == shapes:", "if False:", "test_parity_values.py"),
    # invariants of the user's own, and those that are named
    Mutant("invariants/__init__.py", "return ended and measured and not (row.runs and observation.abstract)", "return ended", "test_own_invariants.py"),
    Mutant("invariants/own.py", "for row in rows if isinstance(rows, list | tuple) else [()]:", "for row in ():", "test_own_invariants.py"),
    Mutant("invariants/finite.py", "wrong &= np.isfinite(numbers(want))", "pass", "test_finite.py"),
    Mutant("invariants/finite.py", "other = got.before.leaves.get(path)", "other = None", "test_finite.py"),
    Mutant("invariants/recompilation.py", "', weakly typed' if weak(leaf) else ''", "''", "test_recompilation.py"),
    Mutant("invariants/recompilation.py", "if any(MISSING in", "if any(() and MISSING in", "test_recompilation.py"),
    Mutant("engine/observe.py", "return len(traces) > first", "return True", "test_recompilation.py"),
    Mutant("engine/check_call.py", "*notes_of(judgement),", "*judgement.notes,", "test_own_invariants.py"),
    Mutant("engine/cases.py", "(row.name for row in rows_of(self.settings.invariants) if row.runs and self.subject.abstract)", "()", "test_own_invariants.py"),
    Mutant("runner/execution.py", "of_body = need.of_body\n", "of_body = need.of_body\n            return self._once(nesting, body, settings)\n", "test_own_invariants.py"),
    Mutant("reproducer/user_source.py", "for statement in fillers(user, node):", "for statement in ():", "test_reproducer.py"),
    Mutant("reproducer/user_source.py", " if not read & user.left_out}", "}", "test_reproducer.py"),
    Mutant("reproducer/files.py", " and not known.program.startswith(NONE)", "", "test_own_invariants.py"),
    Mutant("extension.py", "if earlier is not None and earlier.place != place:", "if False:", "test_own_invariants.py"),
    Mutant("extension.py", "add(invariant, default=False)", "add(invariant, default=invariant.default)", "test_handed_in.py"),
    Mutant("core/catalogue.py", "OWN_INVARIANTS.clear()", "pass", "test_handed_in.py"),
    Mutant("plugin/marker.py", "item.ihook.pytest_nnx_invariants", "item.config.hook.pytest_nnx_invariants", "test_handed_in.py"),
    # reporting
    Mutant("reporting/tally.py", "key=lambda outcome: _RANK.index(outcome.verdict)", "key=lambda outcome: -_RANK.index(outcome.verdict)", "test_plugin_forms.py test_plugin.py test_expected_failures.py"),
    Mutant("core/nesting.py", "layer: Layer | None = field(default=None, compare=False)", "layer: Layer | None = None", "test_wording.py test_wild.py"),
    Mutant("reporting/html_page.py", 'f\'="{html.escape(str(value))}"\'', 'f\'="{value}"\'', "test_page.py"),
    Mutant("reporting/html_page.py", "return max(highest, min(budget, _HEADROOM * highest), 1)", "return max(highest, budget, 1)", "test_page.py"),
    Mutant("reporting/baseline_file.py", "type(value) is int", "isinstance(value, int)", "test_baseline_file.py"),
    Mutant("reporting/baseline_update.py", "or end.narrowed or end.replayed:", "or end.replayed:", "test_baseline_policy.py"),
    Mutant("reporting/hints.py", 'LostBuffer(cause="sharding" | "not returned" as cause)', 'LostBuffer(cause="sharding" as cause)', "test_hints.py"),
    Mutant("reporting/hints.py", 'leak.place == "module" and finding.has_data', "False", "test_kept_state.py"),
    Mutant("reporting/hints.py", "not is_plain(leak) and leak.holder not in OUTLIVING and", "", "test_wording.py"),
    Mutant("reporting/hints.py", "has_data and leak.holder in TREES", "has_data", "test_kept_in_containers.py"),
    Mutant("reporting/hints.py", '(*TREES, "tuple", "set", "deque", "array")', "TREES", "test_kept_in_containers.py"),
    Mutant("watch/programs.py", "if program and every else set()", "if False else set()", "test_programs.py"),
    Mutant("watch/programs.py", "if id(var) not in handed_out:", "if True:", "test_programs.py"),
    Mutant("watch/programs.py", "any(how(jaxpr, number, output) for how in hows)", "True", "test_programs.py"),
    Mutant("watch/leftovers.py", 'if nodes[owner] == "variable":', "if False:", "test_leftovers.py"),
    Mutant("invariants/memory.py", "any(constant.name for constant in profile.captured)", "profile.captured", "test_memory_lines.py"),
    Mutant("runner/neighbours.py", " and not (constants and near.nesting.captures)", "", "test_memory_lines.py"),
    Mutant("reporting/wording.py", "*others[: SHOWN_BUFFERS - 1]", "*others[:SHOWN_BUFFERS]", "test_wording.py"),
    Mutant("engine/parity.py", "DIRECTIONS = 8", "DIRECTIONS = 1", "test_parity_values.py"),
    Mutant("subject/subject.py", "        finally:\n            before.places.restore()\n", "        finally:\n            pass\n", "test_check_call.py"),
    Mutant("subject/waste.py", "if written and number in leaves:", "if number in leaves:", "test_advice.py"),
    Mutant("subject/waste.py", "eqn.invars[operand], written or part", "eqn.invars[operand], part", "test_advice.py"),
    Mutant("invariants/advice.py", "if leaf.leaf < len(leaves):\n            lines", "if True:\n            lines", "test_advice.py"),
    # reproducer
    Mutant("reproducer/calls_of_test.py", "__import__('atexit').register({made}_steps.close)", "pass", "test_reproducer_files.py"),
    Mutant("reproducer/checks.py", "if key not in before}", "if key in before}", "test_pasted_checks.py"),
    Mutant("reproducer/checks.py", "elif not kept(old, new):", "elif kept(old, new):", "test_pasted_checks.py"),
    Mutant("reproducer/assertions.py", "if StateCopied in kinds else", "if PeakOverBudget in kinds else", "test_reproducer.py"),
    Mutant("reproducer/form.py", "asked.donates and not asked.viewed and", "asked.donates and", "test_reproducer.py"),
    # runner
    Mutant("runner/exclusions.py", "exclusions = replace(exclusions, refused=exclusions.refused | {style})", "pass", "test_sweep.py test_compose.py test_modes.py test_modes_of_models.py"),
    Mutant("runner/chains.py", "if longest > 2 and idle else []", "if False else []", "test_chains.py"),
    Mutant("runner/chains.py", "yield pair\n", "pass\n", "test_chains.py"),
    Mutant("runner/sweep.py", 'if is_named and case.settings.all == "off":', "if False:", "test_sweep.py"),
    Mutant("runner/run.py", "self.facts += executed.facts\n        for outcome", "for outcome", "test_api.py test_notes.py"),
    Mutant("runner/run.py", "whole, repeats = not drawn or self.remembers,", "whole, repeats = True,", "test_api.py"),
    Mutant("runner/errors.py", "return (False, error.outcome.nesting.plainness)", "return (True, error.outcome.nesting.plainness)", "test_errors.py"),
    # watch
    Mutant("watch/leftovers.py", "return not all(reported.holds(value) for value, _ in seen.leftovers)", "return bool(seen.leftovers)", "test_leftovers.py"),
    Mutant("watch/leftovers.py", "if not self.holds(value):", "if True:", "test_watch_run.py"),
    Mutant("watch/leftovers.py", "not compat.is_tracer(compat.variable_value(node)) and compat.is_pinned(node)", "False", "test_leftovers.py"),
    Mutant("watch/leftovers.py", "tracers = _tracers(seen.nodes, left_out)", "tracers = _tracers([pair for pair in seen.nodes if not isinstance(pair[1], type)], left_out)", "test_watch_forms.py"),
    Mutant("watch/frames.py", ' if not root[0].startswith("@")', "", "test_watch_outcomes.py"),
    Mutant("watch/donation.py", "as_many.dtype.itemsize > aval", "as_many.dtype.itemsize >= aval", "test_leftovers.py"),
    Mutant("watch/donation.py", "buffers.type in types or not", "buffers.type in types or", "test_watch_message.py"),
    Mutant("watch/programs.py", "program is not None and any(program[1])", "False", "test_watch_outcomes.py"),
    Mutant("watch/programs.py", "not self._fixture and program", "program", "test_watch_outcomes.py"),
    Mutant("invariants/memory.py", "if not read_first or compat.barriers_order()", "if compat.barriers_order()", "test_read_first.py"),
    Mutant("inspection/pointers.py", 'not in ("memoryview", "PyCapsule")', 'not in ("PyCapsule",)', "test_check_call.py"),
    Mutant("inspection/pointers.py", "while isinstance(base, np.ndarray):", "while False:", "test_check_call.py"),
    Mutant("subject/jaxpr_flow.py", "written_in_part(jaxpr, number) and not overwritten(jaxpr, number)", "written_in_part(jaxpr, number)", "test_dataflow.py"),
    Mutant("subject/waste.py", 'in MOVES | {"reshape"}', "in MOVES", "test_reordered.py"),
    Mutant("subject/waste.py", "eqn if name in MOVES else move", "eqn", "test_reordered.py"),
    Mutant("invariants/advice.py", "leaf.leaf < len(leaves) and leaf.bytes", "leaf.bytes", "test_reordered.py"),
    Mutant("subject/waste.py", "or before.itemsize == 1", "", "test_advice.py"),
    Mutant("invariants/memory.py", 'all(copy.kind == "output" for', "any(True for", "test_carried_copies.py"),
    Mutant("engine/example.py", "if 0 < len(without_values) < len(leaves):", "if without_values:", "test_abstract.py"),
    Mutant("invariants/memory.py", "ordered = copies and", "ordered =", "test_read_first.py"),
    Mutant("watch/donation.py", "if type_ == kind)", "if type_ != kind)", "test_watch_outcomes.py"),
    Mutant("watch/programs.py", "and memory.peak > self.budget", "and memory.arguments > self.budget", "test_programs.py"),
    Mutant("watch/programs.py", "if key in paths\n    )", ")", "test_programs.py"),
    Mutant("watch/programs.py", " or executable.differentiates()", "", "test_programs.py"),
    Mutant("watch/programs.py", "if leaf.alone}", "}", "test_programs.py"),
    Mutant("watch/programs.py", 'if buffer.kind == "temporary")', ")", "test_programs.py"),
    Mutant("watch/programs.py", "if size < least:", "if size < 2 * least:", "test_programs.py"),
    Mutant("compat/compiles.py", "unregister(listener)", "pass", "test_programs.py"),
    Mutant("watch/calls.py", "and not inside_a_transform(frame)", "", "test_mark_candidates.py"),
    Mutant("watch/calls.py", '"Module", None)', '"Object", None)', "test_mark_candidates.py"),
    Mutant("watch/calls.py", "caller = _outermost(frame, type(called)).f_back", "caller = frame.f_back", "test_mark_candidates.py"),
    Mutant("watch/candidates.py", "in {*clashes, *draft.collected}}", "in {*clashes}}", "test_mark_candidates.py"),
    Mutant("watch/candidates.py", "if call.code is not code:", "if False:", "test_mark_candidates.py"),
    Mutant("watch/candidates.py", "if not isinstance(statement, _SIMPLE + _DEFINITIONS):", "if False:", "test_mark_candidates.py"),
    Mutant("watch/candidates.py", 'node.id == "self") or', 'node.id == "") or', "test_mark_candidates.py"),
    Mutant("watch/candidates.py", "if bound.get(name, line) != line]", "if False]", "test_mark_candidates.py"),
    # plugin
    Mutant("watch/returns.py", "self._look_into(frame)", "pass", "test_watch_outcomes.py"),
    Mutant("watch/returns.py", "in functions[-1:]]", "in functions]", "test_watch_returns.py"),
    Mutant("watch/returns.py", "not _is_inner(frame) and ", "", "test_watch_returns.py"),
    Mutant("plugin/watch.py", "if report.passed and", "if", "test_mark_candidates.py"),
    Mutant("plugin/watch.py", "if self.path.exists():\n            raise", "if False:\n            raise", "test_mark_candidates.py"),
    Mutant("plugin/watch.py", "self.programs.of(fixture=fixturedef.argname)", "self.programs.of()", "test_watch_programs.py"),
    Mutant("plugin/watch.py", "if fixture.argname in item.fixturenames or fixture not in set_up_before", "if False", "test_watch_forms.py"),
    Mutant("plugin/options.py", "(*row.kind.words, *others)", "row.kind.words", "test_options.py"),
    Mutant("plugin/options.py", "return on_command_line(config, name, options) or in_ini_file(config, name)", "return in_ini_file(config, name) or on_command_line(config, name, options)", "test_options.py"),
    Mutant("plugin/marker.py", "*reversed([*_from_markers(item)])", "*_from_markers(item)", "test_plugin_collection.py"),
    Mutant("plugin/worker_data.py", "and not self.interrupted", "", "test_worker_data.py"),
    Mutant("plugin/hooks.py", 'not str(pair[0]).startswith("nnx_")', "True", "test_plugin.py test_plugin_forms.py"),
)  # fmt: skip


def survives(mutant: Mutant) -> str:
    """Why a mutant is alive; empty where a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            ROOT / "pytest_nnxcheck", Path(folder) / "pytest_nnxcheck", ignore=shutil.ignore_patterns("__pycache__")
        )
        path = Path(folder) / "pytest_nnxcheck" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"{mutant.file} has {text.count(mutant.old)} times what is to be broken: write the mutant anew"
        path.write_text(text.replace(mutant.old, mutant.new))
        for name in mutant.tests.split():
            (test,) = (ROOT / "tests").rglob(name)
            command = [
                sys.executable,
                "-P",
                "-m",
                "pytest",
                "-q",
                "-x",
                "-n",
                "2",
                "-p",
                "no:cacheprovider",
                "-m",
                "not full",
                str(test),
            ]
            environment = {**os.environ, "PYTHONPATH": folder, "PYTHONSAFEPATH": "1", "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            if "FAILED tests/" in done.stdout or "ERROR tests/" in done.stdout:
                return ""
            if done.returncode != 0:
                return f"{name} ended with {done.returncode}: {done.stdout[-300:]}"
    return f"no test of {mutant.tests} failed"


def main(numbers: list[int]) -> int:
    """How many of the mutants are alive."""
    alive = 0
    for number in numbers or range(len(MUTANTS)):
        mutant = MUTANTS[number]
        reason = survives(mutant)
        alive += bool(reason)
        print(f"{number:>2} {'ALIVE' if reason else 'dead '} {mutant.file}: {mutant.old!r} {reason}", flush=True)  # noqa: T201  # a program that reports
    return alive


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
