"""What a command line may name, and the notation of inputs: as text, before anything is imported."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.named.command_line import read_all

CHECK, INPUTS, BUILD, ABSTRACT = "--nnx-check", "--nnx-inputs", "--nnx-build", "--nnx-abstract"


def read(*typed, ids=()):
    return read_all(list(typed), ids)


def inputs_of(text):
    (named,) = read((CHECK, "models:Block"), (INPUTS, text))
    return named.inputs


def value(text, *, abstract=False):
    (given,) = inputs_of(text)
    code = given.expression(abstract=abstract).partition("=")[2] if given.name else given.expression(abstract=abstract)
    return eval(code, {"jax": jax, "jnp": jnp, "nnx": nnx})


@pytest.mark.parametrize(
    "text, shape, dtype",
    [
        ("f32[8,64]", (8, 64), "float32"),
        ("bf16[2, 3]", (2, 3), "bfloat16"),
        ("i32[8]", (8,), "int32"),
        ("u8[1]", (1,), "uint8"),
        ("bool[2,2]", (2, 2), "bool"),
        ("c64[4]", (4,), "complex64"),
        ("f32[]", (), "float32"),
        ("float16[3]", (3,), "float16"),
        ("x=f32(8,64)", (8, 64), "float32"),
    ],
)
def test_an_array_is_written_by_its_dtype_and_shape(text, shape, dtype):
    for made in (value(text), value(text, abstract=True)):
        assert (made.shape, made.dtype) == (shape, jnp.dtype(dtype))
    assert isinstance(value(text, abstract=True), jax.ShapeDtypeStruct)


def test_numbers_are_random_indices_are_zero_and_masks_are_true():
    assert float(jnp.std(value("f32[64,64]"))) > 0.5
    assert not value("i32[8]").any()
    assert value("bool[3]").all()


def test_a_key_of_random_numbers():
    assert jnp.issubdtype(value("key").dtype, jax.dtypes.prng_key)
    assert value("key").shape == value("key", abstract=True).shape == ()
    assert value("key[3]").shape == value("key[3]", abstract=True).shape == (3,)
    assert isinstance(value("key", abstract=True), jax.ShapeDtypeStruct)


@pytest.mark.parametrize("text", ["3", "-0.5", "True", "None", "'train'", "(1, 2)"])
def test_a_plain_value_is_python(text):
    assert value(text) == value(text, abstract=True) == eval(text)


def test_several_inputs_and_names():
    given = inputs_of(" f32[8, 64];key ; train=True;")
    assert [each.spelled for each in given] == ["f32[8,64]", "key", "train=True"]
    assert [each.name for each in given] == ["", "", "train"]


def test_options_belong_to_the_check_before_them_and_those_before_the_first_to_all():
    one, two, three = read(
        (INPUTS, "f32[1]"),
        (CHECK, "models:One"),
        (CHECK, "models:Two.decode"),
        (INPUTS, "i32[2]"),
        (INPUTS, "key"),
        (ABSTRACT, ""),
        (CHECK, "models:Three"),
        (BUILD, "Three( 4 )"),
    )
    assert [each.label for each in (one, two, three)] == [
        "models:One(f32(1))",
        "models:Two.decode(abstract;i32(2);key)",
        "models:Three(Three(4);f32(1))",
    ]
    assert two.options == [INPUTS, "i32[2];key", ABSTRACT]
    assert three.options == [INPUTS, "f32[1]", BUILD, "Three(4)"]


@pytest.mark.parametrize(
    "typed",
    [
        [(CHECK, "a.b:C")],
        [(CHECK, "a.b:C.decode"), (INPUTS, "f32[8,64];scale=2.0"), (ABSTRACT, "")],
        [(CHECK, "a.b:C"), (BUILD, "C([1, 2], f(3))"), (INPUTS, "i32[8];[1, 2]")],
        [(CHECK, "a.b:C"), (BUILD, "C(1)"), (ABSTRACT, "")],
    ],
)
def test_an_id_is_read_back_as_the_same_check(typed):
    (named,) = read(*typed)
    assert read(ids=[named.label]) == (named,)


def test_the_same_check_twice_is_one():
    assert len(read((CHECK, "a:B"), (CHECK, "a:B"), ids=["a:B"])) == 1


WRONG = [
    ([(CHECK, "models")], "option --nnx-check: 'models' has no colon, write package.module:Name"),
    ([(CHECK, "models:")], "option --nnx-check: 'models:' is not a module and a name, write package.module:Name"),
    ([(CHECK, "a-b:C")], "option --nnx-check: 'a-b:C' is not a module and a name"),
    ([(CHECK, "src/models.py::Block")], "'src/models.py::Block' is a file, write its module: src.models:Block"),
    ([(CHECK, "models.py")], "'models.py' is a file, write its module: models:Name"),
    ([(CHECK, "a:B(f32(8)")], "is not an expression of Python"),
    ([(CHECK, "a:B(")], r"'a:B\(' has no '\)' at its end, write a:B with --nnx-inputs or --nnx-build"),
    ([(INPUTS, "f32[8]")], "option --nnx-inputs needs a check: add --nnx-check package.module:Name"),
    ([(ABSTRACT, "")], "option --nnx-abstract needs a check"),
    (
        [(CHECK, "a:B"), (INPUTS, "fp32[8]")],
        "option --nnx-inputs: 'fp32\\[8\\]' has an unknown dtype 'fp32', did you mean 'f32'",
    ),
    ([(CHECK, "a:B"), (INPUTS, "zz[8]")], "write one of .*bf16, c64, bool, float16, .*complex64, key"),
    ([(CHECK, "a:B"), (INPUTS, "f32[B,8]")], "'f32\\[B,8\\]' needs a shape of numbers from 0 on, write f32\\[8,64\\]"),
    ([(CHECK, "a:B"), (INPUTS, "f32[-1]")], "needs a shape of numbers from 0 on"),
    (
        [(CHECK, "a:B"), (INPUTS, "f32[8],i32[8]")],
        "cannot read the input 'f32\\[8\\],i32\\[8\\]', write f32\\[8,64\\], .*with ';' between several",
    ),
    ([(CHECK, "a:B"), (INPUTS, "f32")], "cannot read the input 'f32'"),
    ([(CHECK, "a:B"), (BUILD, "B(")], "option --nnx-build: 'B\\(' is not an expression of Python"),
]


@pytest.mark.parametrize("typed, message", WRONG, ids=[str(typed[-1]) for typed, _ in WRONG])
def test_what_cannot_be_read_says_what_to_write(typed, message):
    with pytest.raises(SettingError, match=message) as refused:
        read(*typed)
    assert "\n" not in str(refused.value)
