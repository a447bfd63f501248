"""Presets: every word of every known model has its place, and the layouts are those of the field."""

import dataclasses
import json
import math
from functools import cache
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import presets
from axisrules.presets import MeshRules, data_parallel_rules, fsdp_rules, partition_spec_for_names

DATA = Path(__file__).parent / "data"
FILES = sorted(
    f"{file.parent.name}/{file.stem}" for kind in ("models", "hf") for file in DATA.glob(f"{kind}/*")
)
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn", "U8": "uint8"}
DTYPES |= {"I32": "int32", "I64": "int32"}  # as it is held with x64 off
MIB = 2**20

PRESETS = {  # on eight devices
    "data_parallel": (presets.data_parallel(), "data=4,model=2"),
    "fsdp": (presets.fsdp(("data", "model")), "data=4,model=2"),
    "tensor_parallel": (presets.tensor_parallel(), "data=4,model=2"),
    "fsdp_tensor_parallel": (presets.fsdp_tensor_parallel(), "data=4,model=2"),
    "sequence_parallel": (presets.sequence_parallel(), "data=4,model=2"),
    "expert_parallel": (presets.expert_parallel(), "data=2,model=2,expert=2"),
}
every_preset = pytest.mark.parametrize("preset", PRESETS)
every_file = pytest.mark.parametrize("file", FILES)


@cache
def rows(file):
    """(paths, leaf, names) of every row of a file: the arrays of all layers that are alike."""
    return [row(one) for one in json.loads((DATA / f"{file}.json").read_text())["params"]]


def row(one):
    names = []
    for word in one["names"] if "names" in one else one["dims"]:
        names.append(f"{word}_out" if word is not None and word in names else word)
    path = one["path"]
    layers = numbers(one.get("i", [[0, one["repeat"]]])) if "{i}" in path else [0]
    experts = numbers(one.get("e", [[0, 1]]))
    paths = [path.replace("{i}", str(i)).replace("{e}", str(e)) for i in layers for e in experts]
    return paths, jax.ShapeDtypeStruct(one["shape"], DTYPES[one.get("dtype", "BF16")]), tuple(names)


def numbers(ranges):
    return [number for first, last in ranges for number in range(first, last)]


def plan_of(arrays, rules, mesh, **options):
    tree = {path: leaf for path, leaf, _ in arrays}
    names = {path: names for path, _, names in arrays}
    return ar.plan(tree, names, mesh=mesh, rules=rules, indivisible="next", unmapped="error", **options)


@cache
def placements(file, preset):
    """One placement per row of the file."""
    return plan_of(
        [(paths[0], leaf, names) for paths, leaf, names in rows(file)], *PRESETS[preset]
    ).placements


def whole_model(file):
    return [(path, leaf, names) for paths, leaf, names in rows(file) for path in paths]


def axes_of(spec):
    return [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]


def word_tuples():
    return sorted({one[2] for file in FILES for one in rows(file)}, key=str)


# Every word has its place.


@every_preset
@every_file
def test_a_preset_maps_every_word_of_a_model(preset, file):
    assert len(placements(file, preset)) == len(rows(file))


@every_preset
@every_file
def test_no_array_has_a_mesh_axis_twice(preset, file):
    for placement in placements(file, preset):
        axes = axes_of(placement.spec)
        assert len(set(axes)) == len(axes)


def test_all_presets_mention_the_same_words():
    assert len({frozenset(rules.by_name) for rules, _ in PRESETS.values()}) == 1


@every_preset
def test_a_preset_knows_the_words_of_activations_and_stacked_layers(preset):
    words = "batch length sequence layers"
    activation = "batch length norm_length embed heads kv_heads kv mlp vocab exp"
    known = PRESETS[preset][0].by_name
    assert {*words.split(), *(f"activation_{word}" for word in activation.split())} <= known.keys()


@every_preset
def test_a_stacked_layer_axis_and_the_width_of_an_activation_are_whole(preset):
    rules = dict(PRESETS[preset][0])
    assert (rules["layers"], rules["activation_embed"], rules["norm"]) == (None, None, None)


# What the layouts are.

SPECS = [
    ("data_parallel", "batch length embed", P("data", None, None)),
    ("data_parallel", "embed mlp", P(None, None)),
    ("fsdp", "batch length embed", P(("data", "model"), None, None)),
    ("fsdp", "embed mlp", P(("data", "model"), None)),
    ("fsdp", "mlp embed", P(None, ("data", "model"))),
    ("fsdp", "embed embed_out", P(("data", "model"), None)),
    ("fsdp", "keep_1 keep_2 conv_in conv_out", P(None, None, None, ("data", "model"))),
    ("fsdp", "norm", P(None)),
    ("fsdp", "layers embed mlp", P(None, ("data", "model"), None)),
    ("tensor_parallel", "embed mlp", P(None, "model")),
    ("tensor_parallel", "mlp embed", P("model", None)),
    ("tensor_parallel", "embed_attn q_heads kv", P(None, "model", None)),
    ("tensor_parallel", "heads kv embed_attn", P("model", None, None)),
    ("tensor_parallel", "embed joined_kv", P(None, "model")),
    ("tensor_parallel", "qkv embed", P("model", None)),
    ("tensor_parallel", "vocab embed", P("model", None)),
    ("tensor_parallel", "exp embed_moe mlp_moe", P(None, None, "model")),
    ("tensor_parallel", "heads heads_out", P("model", None)),
    ("tensor_parallel", "heads lora_rank", P("model", None)),
    ("tensor_parallel", "groups mlp", P(None, "model")),  # scales of a block's first matmul
    ("tensor_parallel", "groups embed", P("model", None)),  # and of its last
    ("tensor_parallel", "out_channels in_channels conv_w", P("model", None, None)),
    ("tensor_parallel", "batch length activation_embed", P("data", None, None)),
    ("tensor_parallel", "batch length activation_heads activation_kv", P("data", None, "model", None)),
    ("fsdp_tensor_parallel", "embed mlp", P("data", "model")),
    ("fsdp_tensor_parallel", "mlp embed", P("model", "data")),
    ("fsdp_tensor_parallel", "vocab embed_vocab", P("model", "data")),
    ("fsdp_tensor_parallel", "heads lora_rank", P("model", "data")),
    ("fsdp_tensor_parallel", "keep_1 keep_2 conv_in conv_out", P(None, None, "data", "model")),
    ("fsdp_tensor_parallel", "batch length embed", P("data", None, None)),
    ("sequence_parallel", "embed mlp", P(None, "model")),
    ("sequence_parallel", "batch length embed", P("data", "model", None)),
    ("sequence_parallel", "batch sequence activation_embed", P("data", "model", None)),
    ("sequence_parallel", "batch length activation_heads activation_kv", P("data", None, "model", None)),
    ("sequence_parallel", "batch length mlp", P("data", None, "model")),
    ("sequence_parallel", "batch length activation_vocab", P("data", None, "model")),
    ("expert_parallel", "exp embed_moe mlp_moe", P("expert", "data", "model")),
    ("expert_parallel", "experts mlp embed", P("expert", "model", "data")),
    ("expert_parallel", "embed mlp", P(("data", "expert"), "model")),
    ("expert_parallel", "batch length activation_embed", P(("data", "expert"), None, None)),
    ("expert_parallel", "activation_exp batch _ activation_mlp", P("expert", "data", None, "model")),
]


@pytest.mark.parametrize(("preset", "names", "spec"), SPECS)
def test_a_preset_lays_out(preset, names, spec):
    assert ar.logical_to_mesh_axes(names, PRESETS[preset][0]) == spec


@every_file
def test_data_parallel_splits_no_weight(file):
    assert not any(axes_of(placement.spec) for placement in placements(file, "data_parallel"))


@every_file
def test_fsdp_splits_every_large_weight_that_has_words_over_all_devices(file):
    large = [one for one in placements(file, "fsdp") if any(one.names) and one.nbytes >= MIB]
    assert {one.path: one.ways for one in large} == {one.path: 8 for one in large}


@every_file
def test_fsdp_and_fill_hold_a_model_within_two_percent_of_its_share(file):
    plan = plan_of(whole_model(file), presets.fsdp(), "data=8", fill="data", min_bytes=2**16)
    assert plan.nbytes / 8 <= plan.bytes_per_device <= 1.02 * plan.nbytes / 8


@every_file
def test_tensor_parallel_splits_heads_hidden_units_and_vocabulary_but_never_the_width(file):
    inner = {"heads", "q_heads", "kv_heads", "joined_kv", "qkv", "mlp", "mlp_moe", "vocab"}
    for placement in placements(file, "tensor_parallel"):
        for dim in placement.resolution.dims:
            if dim.name in inner and dim.size % 2 == 0:
                assert dim.axes == ("model",), placement.path
            if dim.name is not None and dim.name.startswith("embed"):
                assert dim.axes == (), placement.path


@every_file
def test_sequence_parallel_lays_weights_out_as_tensor_parallel(file):
    pairs = zip(
        placements(file, "sequence_parallel"),
        placements(file, "tensor_parallel"),
        strict=True,
    )
    assert all(one.spec == other.spec for one, other in pairs if "length" not in one.names)


# A share per device that is worse than 1.03 times the ideal, and why.
UNEVEN = {
    "models/gpt2": 1.32,  # an odd vocabulary is not split over model
    "models/sdxl-unet": 4.44,  # half of the weights have no words
    "hf/gpt-neox-20b": 1.04,  # mask buffers without words
    "hf/gpt2": 1.94,  # mask buffers without words, and the odd vocabulary
    "hf/llama-3-8b-lora": 1.35,  # the adapters' input side has nothing for model
    "hf/mamba-130m": 1.14,  # the inner weights have nothing for data
    "hf/wav2vec2-base": 1.08,  # the positional convolution has nothing for model
}


@pytest.mark.parametrize("preset", ["fsdp_tensor_parallel", "expert_parallel"])
@every_file
def test_a_preset_that_uses_all_axes_holds_a_model_near_its_share(preset, file):
    count = {paths[0]: len(paths) for paths, _, _ in rows(file)}
    total = sum(one.nbytes * count[one.path] for one in placements(file, preset))
    held = sum(one.bytes_per_device * count[one.path] for one in placements(file, preset))
    assert held <= UNEVEN.get(file, 1.03) * total / 8


# Fallbacks.


def test_the_width_takes_what_an_odd_vocabulary_leaves():
    options = {"mesh": "data=4,model=2", "indivisible": "next"}
    gpt2 = ("vocab embed", (50257, 768))
    assert ar.resolve(*gpt2, rules=presets.fsdp(), **options).spec == P(None, "data")
    assert ar.resolve(*gpt2, rules=presets.tensor_parallel(), **options).spec == P(None, None)
    assert ar.resolve(*gpt2, rules=presets.fsdp_tensor_parallel(), **options).spec == P(None, "data")


def test_fsdp_splits_another_dimension_where_the_width_does_not_divide():
    options = {"mesh": "data=64", "rules": presets.fsdp(), "indivisible": "next"}
    assert ar.resolve("embed mlp", (100, 6400), **options).spec == P(None, "data")
    assert ar.resolve("mlp embed", (6400, 100), **options).spec == P("data", None)
    assert ar.resolve("vocab embed", (640, 100), **options).spec == P("data", None)


def test_kv_heads_that_are_fewer_than_the_axis_is_wide_stay_whole_and_the_width_takes_both_axes():
    options = {"mesh": "data=4,model=16", "indivisible": "next"}
    key = ("embed_attn kv_heads kv_head_dim", (4096, 8, 128))
    assert ar.resolve(*key, rules=presets.tensor_parallel(), **options).spec == P(None, None, None)
    both = ar.resolve(*key, rules=presets.fsdp_tensor_parallel(), **options)
    assert both.spec == P(("data", "model"), None, None)


def test_experts_that_do_not_divide_leave_their_axes_to_the_width():
    found = ar.resolve(
        "experts mlp embed", (3, 64, 64), mesh="data=2,model=2,expert=2",
        rules=presets.expert_parallel(), indivisible="next",
    )  # fmt: skip
    assert found.spec == P(None, "model", ("data", "expert"))


# Axis names.

NAMES = {"data": ("replica", "shard"), "model": "tp", "expert": "ep"}
RENAMED = {
    "data_parallel": (presets.data_parallel, ("data",)),
    "fsdp": (presets.fsdp, ("data",)),
    "tensor_parallel": (presets.tensor_parallel, ("model", "data")),
    "fsdp_tensor_parallel": (presets.fsdp_tensor_parallel, ("data", "model")),
    "sequence_parallel": (presets.sequence_parallel, ("data", "model")),
    "expert_parallel": (presets.expert_parallel, ("data", "model", "expert")),
}


def renamed(spec):
    new = {"data": ("replica", "shard"), "model": ("tp",), "expert": ("ep",)}
    entries = [sum((new[axis] for axis in axes_of([entry])), ()) for entry in spec]
    return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))


@every_preset
def test_renamed_axes_give_the_renamed_specs(preset):
    make, axes = RENAMED[preset]
    rules = make(**{axis: NAMES[axis] for axis in axes})
    for names in [*word_tuples(), ("batch", "length", "activation_mlp"), ("activation_exp", "batch")]:
        assert ar.logical_to_mesh_axes(names, rules) == renamed(ar.logical_to_mesh_axes(names, make()))


def test_the_axes_are_positional_in_the_order_of_the_presets_name():
    assert presets.tensor_parallel("tp") == presets.tensor_parallel(model="tp")
    assert presets.fsdp_tensor_parallel("x", "y") == presets.fsdp_tensor_parallel(data="x", model="y")
    assert presets.expert_parallel("x", "y", "z") == presets.expert_parallel(data="x", model="y", expert="z")


def test_a_preset_without_an_axis_is_the_smaller_preset():
    assert dict(presets.fsdp_tensor_parallel(model=None)) == dict(presets.fsdp())
    assert dict(presets.tensor_parallel(None)) == dict(presets.data_parallel())
    assert list(presets.expert_parallel(expert=None)) == list(presets.fsdp_tensor_parallel())
    assert set(dict(presets.fsdp(None)).values()) == {None}
    assert "data" not in axes_of(axes for _, axes in presets.tensor_parallel(data=None))


def test_experts_may_share_the_data_axes():
    rules = presets.expert_parallel(expert="data", model=None)
    assert ar.logical_to_mesh_axes("exp embed_moe mlp_moe", rules) == P("data", None, None)
    assert ar.logical_to_mesh_axes("embed mlp", rules) == P("data", None)
    assert ar.logical_to_mesh_axes("batch length", rules) == P("data", None)


def test_equal_axes_give_the_same_rules_so_that_what_they_decided_is_kept():
    assert presets.fsdp("data") is presets.fsdp(("data",))


@pytest.mark.parametrize("axis", [3, "", ("data", "data"), {"data"}])
def test_an_argument_that_is_no_mesh_axis_is_refused(axis):
    with pytest.raises(ar.RulesError, match="maps 'data' to"):
        presets.fsdp_tensor_parallel(axis)


# MeshRules.

DATARAX = [
    (fsdp_rules(data_axis="data", model_axis="model"), ("data", "embed"), P("data", "model")),
    (fsdp_rules(), ("data", "heads"), P("data", "model")),
    (fsdp_rules(), ("embed", "mlp"), P("model", None)),  # an axis is claimed once,
    (fsdp_rules(), ("mlp", "embed"), P(None, "model")),  # by the first field
    (fsdp_rules(), ("heads", "mlp"), P(None, "model")),
    (fsdp_rules(), (None, "mlp"), P(None, "model")),
    (fsdp_rules(), (), P()),
    (fsdp_rules("dp", "tp"), ("data", "mlp"), P("dp", "tp")),
    (fsdp_rules(("replica", "data")), ("data", None), P(("replica", "data"), None)),
    (data_parallel_rules(), ("data", "embed"), P("data", None)),  # a field that is None
    (data_parallel_rules("dp"), ("data",), P("dp")),
    (MeshRules(), ("data", "embed", "mlp", "heads"), P(None, None, None, None)),
    (MeshRules(embed="fsdp", mlp="tensor"), ("embed", "mlp"), P("fsdp", "tensor")),
]


@pytest.mark.parametrize(("rules", "names", "spec"), DATARAX)
def test_partition_spec_for_names(rules, names, spec):
    assert partition_spec_for_names(rules, *names) == spec


def test_mesh_rules_made_by_the_factories():
    assert data_parallel_rules() == MeshRules(data="data")
    assert fsdp_rules() == MeshRules(data="data", embed="model", mlp="model", heads="model")


def test_mesh_rules_are_rules_for_everything_else():
    rules = fsdp_rules().to_rules()
    assert rules == ar.Rules({"data": "data", "embed": "model", "mlp": "model", "heads": "model"})
    assert ar.resolve("data embed", (8, 6), mesh="data=4,model=2", rules=rules).spec == P("data", "model")


def test_mesh_rules_are_frozen_hashable_and_take_keywords_alone():
    with pytest.raises(dataclasses.FrozenInstanceError):
        fsdp_rules().data = "x"
    assert hash(fsdp_rules()) == hash(fsdp_rules())
    with pytest.raises(TypeError):
        MeshRules("data")


def test_mesh_rules_refuse_what_is_no_mesh_axis_when_they_are_made():
    with pytest.raises(ar.RulesError, match="rule #2 maps 'mlp' to 3"):
        MeshRules(mlp=3)


def test_the_active_mesh_and_rules_do_not_matter_to_partition_spec_for_names():
    with jax.set_mesh(ar.make_mesh("other=8")), ar.map_logical_axis_names({"data": "other"}):
        assert partition_spec_for_names(fsdp_rules(), "data", "embed") == P("data", "model")


def test_a_name_that_is_no_field_is_an_error_with_the_nearest_one():
    with pytest.raises(ar.UnknownNameError) as caught:
        partition_spec_for_names(fsdp_rules(), "data", "embd")
    assert str(caught.value) == (
        "MeshRules has no 'embd', the name of dimension 1; did you mean 'embed'?\n"
        "  names: ('data', 'embd')\n"
        "  fix:   its names are data, embed, mlp, heads; write None for a dimension that stays whole, "
        "or use axisrules.Rules, which takes any name."
    )
    error = caught.value
    assert (error.name, error.dim, error.nearest) == ("embd", 1, "embed")


def test_all_names_that_are_no_field_are_in_one_error():
    with pytest.raises(ar.UnknownNameError) as caught:
        partition_spec_for_names(fsdp_rules(), "batch", "embed", "kv")
    assert [one.name for one in caught.value.failures] == ["batch", "kv"]


def test_malformed_names_are_refused_as_everywhere():
    with pytest.raises(ar.RepeatedNameError):
        partition_spec_for_names(fsdp_rules(), "embed", "embed")
    with pytest.raises(ar.NamesError):
        partition_spec_for_names(fsdp_rules(), "data", 3)


# The test data.


@every_file
def test_a_file_expands_to_as_many_arrays_as_it_says(file):
    stated = json.loads((DATA / f"{file}.json").read_text())
    expected = stated["num_arrays"] if "num_arrays" in stated else stated["totals"]["tensors"]
    found = whole_model(file)
    assert len({path for path, _, _ in found}) == len(found) == expected
    total = stated["total_params"] if "total_params" in stated else stated["totals"]["elements"]
    assert sum(math.prod(leaf.shape) for _, leaf, _ in found) == total
