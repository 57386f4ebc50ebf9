"""`chex.assert_trees_all_close`: outputs and state of the jitted program against those of the same calls, made eagerly on a twin."""

import chex
import jax
from flax import nnx

from benchmarks.comparison.programs import chosen

PROGRAM, EAGER = chosen(), chosen()


def test_program() -> None:
    out = PROGRAM.run(PROGRAM.jitted(PROGRAM.subject))
    reference = EAGER.reference or EAGER.subject
    reference(*EAGER.args)
    chex.assert_trees_all_close(out, reference(*EAGER.args), rtol=1e-4)
    after, expected = (jax.tree.leaves(nnx.state(program.args[0])) for program in (PROGRAM, EAGER))
    chex.assert_trees_all_close(after, expected, rtol=1e-4)
