"""The language model of the examples is a real one, and the table of its peaks in the docs is true."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from healthy import FLAX

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import large_models
from language_model import MISTRAL_7B, TINY, Decoder
from pytest_nnxcheck.compat import compile_cache

TABLES = (Path(__file__).parents[2] / "docs" / "large_models.md").read_text()
TOKENS = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
FORMS = [form for form in large_models.FORMS if form != "no_graph_updates" or large_models.GRAPH_UPDATES]
LAYER = 218_112_000
"""Parameters of one layer of Mistral 7B."""


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_decoding_gives_the_logits_of_the_whole_text(form):
    config = replace(TINY, form=form)
    logits = nnx.jit(Decoder.__call__)(Decoder(config, rngs=nnx.Rngs(0)), TOKENS)
    decoder, step = Decoder(config, cache=TOKENS.shape, rngs=nnx.Rngs(0)), nnx.jit(Decoder.decode)
    one_by_one = [step(decoder, TOKENS[:, i], jnp.array(i)) for i in range(TOKENS.shape[1])]
    assert float(jnp.abs(logits).max()) > 0.1
    assert jnp.allclose(jnp.stack(one_by_one, axis=1), logits, atol=1e-4)


# --- the table


def measured(call, form, depth=2, dtype=jnp.float32):
    return large_models.measure(call, replace(MISTRAL_7B, depth=depth, dtype=dtype, form=form)).memory


def test_the_peak_is_that_of_a_plain_jax_jit():
    """What anybody gets who writes the compilation by hand, without this project."""
    graphdef, state = nnx.split(large_models.decoder(replace(MISTRAL_7B, depth=2, dtype=jnp.float32)))

    def program(state, tokens):
        model = nnx.merge(graphdef, state)
        return model(tokens), nnx.state(model)

    lowered = jax.jit(program, donate_argnums=0).lower(state, large_models.integers(1, 4096))
    with compile_cache.judged_compiles():
        plain = lowered.compile().memory_analysis()
    ours = measured("forward", "functional")
    assert plain.temp_size_in_bytes == ours.temporaries
    assert plain.argument_size_in_bytes == ours.arguments
    assert plain.output_size_in_bytes == ours.outputs
    assert plain.alias_size_in_bytes == ours.aliased


@pytest.mark.parametrize("call", ["forward", "decoding, batch of 1"])
def test_the_usual_form_holds_one_more_copy_of_the_layers(call):
    depth = 8
    usual, *cured = (measured(call, form, depth).peak for form in FORMS)
    copy = 4 * LAYER * depth
    assert all(0.9 * copy < usual - peak < 1.1 * copy for peak in cured)
    assert max(cured) - min(cured) < 0.01 * copy


SECTION = re.compile(
    r"jax (?P<jax>[\d.]+), flax (?P<flax>[\d.]+), Python [\d.]+, (?P<dtype>\w+), 32 layers\n\n(?P<rows>(?:\|.*\n)+)"
)
HEAD = "| call | form | state | arguments | outputs | temporaries | aliased | peak, GB | seconds |\n|---|---|---|---|---|---|---|---|---|\n"


def sections():
    return [match.groupdict() for match in SECTION.finditer(TABLES)]


def cells(row):
    call, form, *figures = (cell.strip() for cell in row.strip().strip("|").split("|"))
    return call, form, [float(figure) for figure in figures]


def test_every_table_of_the_docs_is_one_that_the_script_prints():
    assert len(sections()) == TABLES.count("| call |") == 1
    for section in sections():
        assert section["rows"].startswith(HEAD)
        for row in section["rows"].removeprefix(HEAD).splitlines():
            _, _, (_, arguments, outputs, temporaries, aliased, peak, _) = cells(row)
            assert peak == pytest.approx(arguments + outputs + temporaries - aliased, abs=0.025)


def test_the_result_has_the_peaks_of_the_whole_table():
    """The short table at the top of the page, row by row: the usual form, and the cure."""
    result = TABLES.partition("## The result")[2].partition("* **")[0]
    short = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) \|$", result, re.MULTILINE)
    peaks = [str(cells(row)[2][-2]) for row in sections()[0]["rows"].removeprefix(HEAD).splitlines()]
    usual, cured, same = peaks[::3], peaks[1::3], peaks[2::3]
    assert [tuple(str(float(figure)) for figure in row) for row in short] == list(zip(usual, cured, strict=True))
    assert cured == same
    assert len(short) == 5


@pytest.mark.parametrize("section", sections(), ids=lambda section: f"jax {section['jax']} {section['dtype']}")
def test_the_first_rows_of_a_table_are_measured_again(section):
    if (section["jax"], section["flax"]) != (jax.__version__, ".".join(map(str, FLAX))):
        pytest.skip(f"the table is that of jax {section['jax']} and flax {section['flax']}")
    rows = [row for row in section["rows"].removeprefix(HEAD).splitlines() if row.startswith("| forward |")]
    config = replace(MISTRAL_7B, dtype=jnp.dtype(section["dtype"]))
    for row, form in zip(rows, FORMS, strict=True):
        again = large_models.measure("forward", replace(config, form=form)).markdown()
        assert cells(again)[2][:-1] == cells(row)[2][:-1]
