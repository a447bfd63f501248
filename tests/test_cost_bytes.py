"""What compilers give one array, and what is known of accelerators."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import axisrules as ar
from axisrules import cost

DATA = Path(__file__).parent / "data/pricing"
PADDING = json.loads((DATA / "padding_v5e.json").read_text())
shapes = st.lists(st.integers(1, 300), max_size=4).map(tuple)
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "bool": 8, "int4": 4, "float8_e4m3fn": 8}
dtypes = st.sampled_from(list(BITS))


@pytest.mark.parametrize("one", PADDING, ids=lambda one: f"{one['dtype']}{one['shape']}")
def test_an_array_has_the_bytes_that_the_tpu_compiler_gives_it(one):
    assert cost.array_bytes(one["shape"], one["dtype"], "TPU v5e") == one["arg"]


@pytest.mark.parametrize("hardware", [None, "H100", "A100"])
def test_an_array_is_not_padded_elsewhere(hardware):
    assert [cost.array_bytes(one["shape"], one["dtype"], hardware) for one in PADDING] == [
        one["plain"] for one in PADDING
    ]


@given(shapes, dtypes, st.randoms())
def test_padding_only_adds_and_does_not_depend_on_the_order_of_dimensions(shape, dtype, random):
    size = cost.array_bytes(shape, dtype, "v5e")
    assert size % 512 == 0
    assert size * 8 >= math.prod(shape) * BITS[dtype]
    turned = list(shape)
    random.shuffle(turned)
    assert cost.array_bytes(turned, dtype, "v5e") == size


@given(shapes.filter(bool), dtypes)
def test_a_larger_array_is_never_smaller(shape, dtype):
    larger = (shape[0] * 2, *shape[1:])
    for hardware in (None, "v5e"):
        assert cost.array_bytes(larger, dtype, hardware) >= cost.array_bytes(shape, dtype, hardware)


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((), "float32", 512),
        ((0,), "float32", 0),
        ((4, 0), "int8", 0),
        ((1024, 3), "int2", 4096),
        (7, "int8", 512),
    ],
)
def test_odd_arrays_have_their_bytes(shape, dtype, size):
    assert cost.array_bytes(shape, dtype, "v5e") == size


def test_a_random_key_counts_as_the_numbers_that_it_is_made_of():
    assert cost.array_bytes((3,), jax.random.key(0).dtype) == 24


@pytest.mark.parametrize(
    ("shape", "dtype"), [((-1,), "int8"), ("ab", "int8"), ((2,), "flot32"), ((2.5,), "int8")]
)
def test_what_is_no_array_is_refused(shape, dtype):
    with pytest.raises(ar.LeafError):
        cost.array_bytes(shape, dtype)


@pytest.mark.parametrize("name", ["TPU v5e", "tpu V5E", "v5e", "TPU v5 lite"])
def test_hardware_has_several_names(name):
    chip = cost.hardware(name)
    assert (chip.name, chip.memory_bytes, chip.ring_multiple) == ("TPU v5e", 16911433728, 16)
    assert cost.hardware(chip) is chip


def test_every_accelerator_has_sources_and_no_figure_is_zero():
    known = cost.load_hardware(Path(cost.__file__).with_name("hardware.json"))
    assert len(known) == 11
    for chip in known:
        assert chip.source
        assert chip.limit is not None
        assert 0 not in dataclasses.astuple(chip)


def test_an_unknown_figure_is_unknown():
    chip = cost.hardware("TPU7x")
    assert (chip.memory_bytes_per_s, chip.link_bytes_per_s) == (None, None)
    assert chip.bandwidth(4) is None


def test_a_closed_ring_has_twice_the_bandwidth():
    chip = cost.hardware("v5e")
    assert (chip.bandwidth(4), chip.bandwidth(16)) == (45e9, 90e9)


def test_beyond_a_node_the_network_is_the_limit():
    chip = cost.hardware("H100")
    assert chip.bandwidth(8) == 450e9
    assert chip.bandwidth(2, inner=8) == pytest.approx(50e9)
    assert 50e9 < chip.bandwidth(16) <= 450e9


MINE = """
[[chips]]
name = "Mine"
memory_bytes = 1000
link_bytes_per_s = 1e9
tile = [8, 128]
sources = ["a data sheet"]
"""


def test_users_add_their_own_hardware_by_a_file(tmp_path):
    path = tmp_path / "chips.toml"
    path.write_text(MINE)
    for chip in (cost.hardware(path), cost.hardware(str(path)), cost.hardware("mine", file=path)):
        assert (chip.name, chip.limit, chip.link_bytes_per_s) == ("Mine", 1000, 10**9)
        assert (chip.source, chip.chip_memory_bytes) == (("a data sheet",), None)
        assert cost.array_bytes((1, 1), "float32", chip) == 512
    assert cost.hardware("v5e", file=path).name == "TPU v5e"


def test_everything_wrong_in_a_file_is_in_one_error(tmp_path):
    path = tmp_path / "chips.toml"
    path.write_text(MINE.replace("1000", "-1").replace("tile", "tiles") + '[[chips]]\nvendor = "x"\n')
    with pytest.raises(ar.AxisRulesError) as caught:
        cost.hardware(path)
    text = str(caught.value)
    assert "memory_bytes of Mine is -1, which is no positive number" in text
    assert "'tiles'; did you mean 'tile'?" in text
    assert "has no name" in text


@pytest.mark.parametrize("text", ["", "x = 1", "chips = 3", "[[chips"])
def test_a_file_without_hardware_is_refused(tmp_path, text):
    path = tmp_path / "chips.toml"
    path.write_text(text)
    with pytest.raises(ar.HardwareError):
        cost.hardware(path)


@pytest.mark.parametrize("name", ["v5f", "", 3, None])
def test_unknown_hardware_is_refused(name):
    with pytest.raises(ar.HardwareError) as caught:
        cost.hardware(name)
    assert "TPU v5e" in caught.value.fix
