"""The tools for users' tests: strategies, assertions, simulated devices, the pytest plugin."""

import math
import re
import subprocess
import sys
import textwrap

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import testing

MESH, RULES = "data=4,model=2", {"embed": "data", "mlp": "model"}
OURS = ar.Rules([("batch", ("data", "fsdp")), ("embed", "fsdp"), ("mlp", "model"), ("norm", None)])


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def planned(tree=None, names=None, mesh=MESH, rules=RULES, **options):
    tree = {"up": {"kernel": zeros(8, 32)}, "down": {"kernel": zeros(32, 8)}} if tree is None else tree
    names = ar.NameTable({"up/*": "embed mlp", "**": "mlp embed"}) if names is None else names
    return ar.plan(tree, names, mesh=mesh, rules=rules, **options)


def find(strategy, wanted):
    """The simplest such value that the strategy draws."""
    return hypothesis.find(strategy, wanted, settings=hypothesis.settings(max_examples=300, database=None))


def reaches(strategy, wanted):
    """That the strategy draws such a value."""
    quick = hypothesis.settings(max_examples=2000, database=None, phases=[hypothesis.Phase.generate])
    hypothesis.find(strategy, wanted, settings=quick)


# Strategies.


@given(names=testing.axis_names(OURS), own=testing.axis_names(max_rank=2))
def test_axis_names_are_distinct_names_of_the_rules_and_none(names, own):
    named = [name for name in names if name is not None]
    assert len(named) == len(set(named))
    assert set(named) <= set(OURS.by_name)
    assert len(names) <= 4
    assert len(own) <= 2
    ar.logical_to_mesh_axes(names, OURS)


@pytest.mark.parametrize(
    "source", [OURS, dict(OURS), list(OURS), ["batch", "embed"], "batch embed", ("batch",)]
)
def test_names_come_from_any_spelling_of_rules_or_of_names(source):
    reaches(testing.axis_names(source), lambda names: names[:1] == ("batch",))
    with pytest.raises(NoSuchExample):
        find(testing.axis_names(source), lambda names: "absent" in names)


def test_without_a_name_to_draw_dimensions_have_none():
    reaches(testing.axis_names(()), lambda names: names == (None, None))
    with pytest.raises(NoSuchExample):
        find(testing.axis_names(ar.Rules()), lambda names: set(names) > {None})


@given(rules=testing.rules("embed mlp", "data=4,model=2", max_size=3))
def test_rules_lead_from_the_names_to_axes_of_the_mesh(rules):
    assert isinstance(rules, ar.Rules)
    assert len(rules) <= 3
    assert set(rules.by_name) <= {"embed", "mlp"}
    ar.resolve(("embed", "mlp"), (8, 8), mesh="data=4,model=2", rules=rules, unmapped="replicate")


AXES_OF = [
    {"data": 4, "model": 2},
    AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2),
    ["data", "model"],
    {"batch": ("data", "model")},
    [("batch", "data"), ("x", "model")],
]


@pytest.mark.parametrize("axes", AXES_OF, ids=str)
def test_axes_come_from_meshes_from_rules_and_from_themselves(axes):
    for pair in [("a", "data"), ("a", ("model", "data")), ("a", None)]:
        reaches(testing.rules(["a"], axes), lambda rules, pair=pair: pair in list(rules))
    reaches(testing.rules(["a"], axes), lambda rules: len(rules.by_name.get("a", ())) > 1)


def test_rules_without_names_or_without_axes_are_still_rules():
    assert find(testing.rules(()), lambda rules: True) == ar.Rules()
    reaches(testing.rules(["a"], ()), lambda rules: list(rules) == [("a", None)])


@given(mesh=testing.meshes(OURS, min_devices=8, max_devices=1024))
def test_meshes_have_every_axis_of_the_rules_and_as_many_devices_as_allowed(mesh):
    assert list(mesh) == ["data", "fsdp", "model"]
    assert 8 <= math.prod(mesh.values()) <= 1024
    ar.plan({"w": zeros(1024, 1024)}, {"w": "embed mlp"}, mesh=mesh, rules=OURS)


def test_meshes_reach_both_limits_sizes_of_1_and_other_primes():
    some = testing.meshes(OURS, min_devices=8, max_devices=1024)
    for count in (8, 1024):
        reaches(some, lambda mesh, count=count: math.prod(mesh.values()) == count)
    reaches(some, lambda mesh: mesh["fsdp"] == 1)
    assert find(some, lambda mesh: True) == {"data": 8, "fsdp": 1, "model": 1}
    reaches(testing.meshes(["a"], primes=(2, 3), max_devices=12), lambda mesh: mesh == {"a": 12})
    reaches(testing.meshes(["a"], primes=(4, 6), max_devices=24), lambda mesh: mesh == {"a": 24})
    with pytest.raises(NoSuchExample):
        find(testing.meshes(["a"], max_devices=64), lambda mesh: mesh["a"] % 3 == 0)


def test_axes_are_absent_only_where_that_is_asked_for():
    reaches(testing.meshes(OURS, absent="drop"), lambda mesh: "model" not in mesh)
    reaches(testing.meshes(OURS, absent="drop"), lambda mesh: list(mesh) == ["model", "data"])
    reaches(testing.meshes(), lambda mesh: len(mesh) == 1)
    reaches(testing.meshes({"a": None}), lambda mesh: len(mesh) > 1)


@given(st.data(), testing.axis_names(OURS), testing.meshes(OURS))
def test_shapes_that_always_divide_never_fail(data, names, mesh):
    shape = data.draw(testing.shapes(names, mesh, divides="always"))
    assert len(shape) == len(names)
    ar.resolve(names, shape, mesh=mesh, rules=OURS, unmapped="error")


def test_shapes_often_divide_and_reach_what_is_odd():
    some = testing.shapes("embed mlp", "data=16,model=3")
    for size in (0, 1, 3, 7, 16, 48):
        reaches(some, lambda shape, size=size: shape[0] == size)
    sizes = testing.shapes(("embed", None), sizes={"embed": [4096, 5120]})
    reaches(sizes, lambda shape: shape[0] == 5120 and shape[1] == 7)
    with pytest.raises(NoSuchExample):
        find(sizes, lambda shape: shape[0] not in (4096, 5120))
    for rank in (1, 2, 3):
        reaches(testing.shapes("embed ..."), lambda shape, rank=rank: len(shape) == rank)
    assert find(testing.shapes(""), lambda shape: True) == ()


@given(testing.trees(OURS, {"data": 2, "fsdp": 2, "model": 2}, divides="always"))
def test_trees_plan_under_the_rules_they_were_drawn_for(tree_and_names):
    tree, _ = tree_and_names
    plan = ar.plan(*tree_and_names, mesh="data=2,fsdp=2,model=2", rules=OURS, unmapped="error")
    assert len(plan.placements) == len(jax.tree.leaves(tree))
    testing.assert_no_axis_twice(plan)
    testing.assert_no_axis_twice(plan.shardings)


def test_trees_nest_dicts_lists_and_tuples_of_abstract_or_host_arrays():
    for kind in (dict, list, tuple):
        reaches(testing.trees(), lambda both, kind=kind: type(both[0]) is kind)
    reaches(testing.trees(), lambda both: isinstance(both[0], jax.ShapeDtypeStruct))
    host = testing.trees(["embed"], arrays="host", sizes={"embed": [3]})
    reaches(host, lambda both: isinstance(both[0], np.ndarray) and both[0].shape == (3,))
    reaches(host, lambda both: getattr(both[0], "size", 0) > 0 and bool(both[0].any()))
    reaches(host, lambda both: len(jax.tree.leaves(both[0])) > 2)


REFUSED = [
    (lambda: testing.meshes(min_devices=9, max_devices=15), "no product of 2 lies between 9 and 15"),
    (lambda: testing.meshes(primes=(1,)), "no numbers over 1"),
    (lambda: testing.meshes(absent="maybe"), "absent='maybe' is no policy"),
    (lambda: testing.shapes("a", divides="never"), "divides='never' is no policy"),
    (lambda: testing.trees(arrays="device"), "arrays='device' is no policy"),
    (lambda: testing.trees(mesh="data=64", arrays="host"), "too large"),
    (lambda: testing.shapes("a", "data=x"), "cannot read 'data=x'"),
    (lambda: testing.rules([("embed", 3)]), "not a mesh axis"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_drawn_is_refused_when_the_strategy_is_made(call, message):
    with pytest.raises(ar.AxisRulesError, match=re.escape(message)):
        call()


def test_a_rule_set_that_leaves_weights_whole_is_found_out():
    """What the strategies are for: the mesh on which a claim fails, made small."""
    rules = ar.Rules({"embed": "data", "mlp": "model"})

    def is_whole(mesh):
        plan = ar.plan({"w": zeros(4096, 64)}, {"w": "mlp embed"}, mesh=mesh, rules=rules, indivisible="next")
        return plan.placements[0].ways < math.prod(mesh.values())

    assert find(testing.meshes(rules, min_devices=8), is_whole) == {"data": 128, "model": 1}


# Assertions.


def test_an_axis_twice_is_found_in_specs_shardings_and_arrays():
    mesh = ar.make_mesh(MESH)
    placed = jax.device_put(zeros(8, 8), NamedSharding(mesh, P("data", "model")))
    abstract = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=placed.sharding)
    testing.assert_no_axis_twice(
        {"a": placed, "b": [placed.sharding, abstract, P(), P(None, P.UNCONSTRAINED)], "c": 3}
    )
    testing.assert_no_axis_twice(planned())
    testing.assert_no_axis_twice(planned({}, {}))
    with pytest.raises(AssertionError, match=re.escape("b/1  P(('data', 'model'), None, 'model')")):
        testing.assert_no_axis_twice({"a": placed, "b": [P(), P(("data", "model"), None, "model")]})
    with pytest.raises(AssertionError, match="no layout to check"):
        testing.assert_no_axis_twice({"a": zeros(8)})


def test_split_arrays_pass_and_the_pattern_may_be_a_regular_expression():
    plan = planned()
    testing.assert_split(plan, "*/kernel", over="model")
    testing.assert_split(plan, "**", over=("data", "model"))
    testing.assert_split(plan, re.compile("(up|down)/kernel"), over="data")
    testing.assert_split(planned(mesh="data=8,model=1"), "**/kernel", over="model")


def message_of(call):
    with pytest.raises(AssertionError) as caught:
        call()
    return str(caught.value)


def test_arrays_that_are_not_split_are_all_named():
    plan = planned(rules={"embed": "data", "mlp": None})
    text = message_of(lambda: testing.assert_split(plan, "*/kernel", over=("data", "model")))
    assert text == textwrap.dedent("""\
        2 of 2 arrays that match '*/kernel' are not split over data, model
          at:    down/kernel  P(None, 'data') for ('mlp', 'embed')
                 up/kernel  P('data', None) for ('embed', 'mlp')
          mesh:  data=4, model=2
          fix:   print(plan.explain('down/kernel')) says why; give one of its names a rule with model.""")


def test_a_pattern_that_matches_nothing_claims_nothing():
    text = message_of(lambda: testing.assert_split(planned(), "*/kernell", over="model"))
    assert text == textwrap.dedent("""\
        no array of the plan matches '*/kernell'
          fix:   the paths are down/kernel, up/kernel; '**' matches any segments.""")
    assert "the paths are none" in message_of(lambda: testing.assert_split(planned({}, {}), "*", over="data"))


def test_an_axis_that_the_mesh_lacks_is_no_failed_claim():
    with pytest.raises(ar.AbsentAxisError, match="no axis 'modl'; did you mean 'model'"):
        testing.assert_split(planned(), "*/kernel", over="modl")


def test_what_fits_passes_and_what_does_not_names_the_largest_first():
    plan = planned({"a": zeros(8, 32), "b": zeros(8)}, {"a": "embed mlp", "b": "_"})
    testing.assert_fits(plan, 160)
    text = message_of(lambda: testing.assert_fits(plan, 159))
    assert text.startswith(
        "160 bytes per device, more than max_bytes_per_device=159\n  at:    a  128 bytes per device"
    )


def test_a_plan_matches_itself_as_a_value_and_as_a_file(tmp_path):
    plan, golden = planned(), tmp_path / "plan.json"
    golden.write_text(plan.to_json(), encoding="utf-8")
    for expected in (plan, planned(), golden, str(golden)):
        testing.assert_matches(plan, expected)
    testing.assert_matches(ar.Plan.from_json(plan.to_json()), plan)


CHANGED = [
    lambda: planned(rules={"embed": "model", "mlp": "data"}),
    lambda: planned(rules={"embed": "data", "mlp": "model", "unused": None}),
    lambda: planned(mesh="data=2,model=4"),
    lambda: planned({"up": {"kernel": zeros(8, 32)}}, {"up": {"kernel": "embed mlp"}}),
    lambda: planned(dtype="bfloat16"),
    lambda: planned(memory_kind="pinned_host"),
]


@pytest.mark.parametrize("change", CHANGED)
def test_a_plan_that_differs_in_anything_does_not_match(change, tmp_path):
    golden = tmp_path / "plan.json"
    golden.write_text(planned().to_json(), encoding="utf-8")
    text = message_of(lambda: testing.assert_matches(change(), golden))
    assert text.startswith(f"the plan differs from {golden}, which stands first here:\n")
    assert text.endswith(f'{golden}\').write_text(plan.to_json(), encoding="utf-8")'.replace("{golden}", ""))
    assert message_of(lambda: testing.assert_matches(change(), planned())).startswith(
        "the plan differs from the expected one"
    )


def test_a_golden_file_that_is_not_there_says_how_to_write_it(tmp_path):
    text = message_of(lambda: testing.assert_matches(planned(), tmp_path / "plan.json"))
    plan = planned()
    eval(text.partition("fix:")[2].strip(), {"pathlib": __import__("pathlib"), "plan": plan})
    testing.assert_matches(plan, tmp_path / "plan.json")
    with pytest.raises(ar.PlanError, match="cannot read the plan"):
        testing.assert_matches(plan, tmp_path)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ar.PlanError, match="no plan"):
        testing.assert_matches(plan, tmp_path / "other.json")


@pytest.mark.parametrize(
    "call",
    [
        lambda: testing.assert_split(3, "*", over="data"),
        lambda: testing.assert_fits(3, 1),
        lambda: testing.assert_matches(3, planned()),
    ],
)
def test_what_is_no_plan_is_refused(call):
    with pytest.raises(ar.PlanError, match="3 is no plan"):
        call()


# Devices.


def python(code, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, **options
    )


def test_simulated_devices_need_no_other_setting():
    done = python("""
        import axisrules as ar, jax
        ar.testing.simulate_devices(3)
        assert [device.platform for device in jax.devices()] == ["cpu"] * 3
        ar.testing.simulate_devices(3)
        """)
    assert done.returncode == 0, done.stderr


def test_devices_cannot_be_simulated_when_jax_has_started():
    testing.simulate_devices(len(jax.devices()))
    with pytest.raises(ar.MeshError) as caught:
        testing.simulate_devices(5)
    assert (
        str(caught.value)
        == textwrap.dedent("""\
        5 devices cannot be simulated any more: JAX has started, with 8 cpu devices
          fix:   call simulate_devices(5) before anything asks JAX for a device, such as at the top of conftest.py, or set JAX_NUM_CPU_DEVICES=5 and JAX_PLATFORMS=cpu in the environment.""")
    )
    assert len(jax.devices()) == 8


@pytest.mark.parametrize("count", [0, -1, 2.0, "8", True, None])
def test_a_count_that_is_no_positive_number_is_refused(count):
    with pytest.raises(ar.MeshError, match="it is no positive number"):
        testing.simulate_devices(count)


def test_the_import_brings_no_hypothesis_and_its_absence_is_named():
    done = python("""
        import sys
        sys.modules["hypothesis"] = None
        import axisrules as ar
        ar.testing.assert_no_axis_twice(ar.plan({}, {}, mesh="a=2", rules={"b": "a"}))
        try:
            ar.testing.meshes()
        except ImportError as error:
            print(error)
        """)
    assert done.stdout == (
        "strategies for tests need hypothesis, which is not installed\n  fix:   pip install 'axisrules[testing]'\n"
    ), done.stderr


# The plugin.

PLUGIN_TESTS = """
import jax
import pytest

def test_without_a_marker_nothing_is_asked():
    assert True

@pytest.mark.devices(8, mesh="data=4,model=2", axis_types={"data": "explicit"})
def test_a_mesh(axisrules_mesh):
    assert axisrules_mesh.shape_tuple == (("data", 4), ("model", 2))
    assert [kind.name for kind in axisrules_mesh.axis_types] == ["Explicit", "Auto"]

@pytest.mark.devices(4)
def test_fewer(axisrules_mesh):
    assert axisrules_mesh.shape_tuple == (("data", 4),)
    assert len(jax.devices()) == 8
"""


def run_pytest(folder, *arguments, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "axisrules_pytest",
        "-p",
        "no:cacheprovider",
        "--strict-markers",
        "-q",
    ]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_marker_simulates_devices_and_the_fixture_is_a_mesh_of_them(tmp_path):
    assert "3 passed" in run_pytest(tmp_path, "-W", "error", test_it=PLUGIN_TESTS)


def test_as_many_devices_are_simulated_as_the_selected_tests_need(tmp_path):
    out = run_pytest(tmp_path, "-k", "fewer", test_it=PLUGIN_TESTS)
    assert "assert 4 == 8" in out, out


def test_more_devices_that_were_set_before_are_left_alone(tmp_path):
    conftest = (
        'import jax\njax.config.update("jax_num_cpu_devices", 16)\njax.config.update("jax_platforms", "cpu")'
    )
    test = "import jax, pytest\n@pytest.mark.devices(8)\ndef test_it(axisrules_mesh):\n assert len(jax.devices()) == 16\n assert axisrules_mesh.size == 8"
    assert "1 passed" in run_pytest(tmp_path, conftest=conftest, test_it=test)


def test_a_test_that_comes_too_late_fails_with_the_reason(tmp_path):
    out = run_pytest(tmp_path, conftest="import jax\njax.devices()", test_it=PLUGIN_TESTS)
    assert "8 devices cannot be simulated any more: JAX has started, with 1 cpu device" in out
    assert "1 passed, 2 errors" in out


def test_a_fixture_without_a_marker_and_a_malformed_marker_say_what_to_write(tmp_path):
    out = run_pytest(tmp_path, test_it="def test_it(axisrules_mesh):\n pass")
    assert '@pytest.mark.devices(8, mesh="data=4,model=2")' in out
    for marker in ("'8'", "8, meshes='data=8'"):
        out = run_pytest(
            tmp_path, test_it=f"import pytest\n@pytest.mark.devices({marker})\ndef test_it():\n pass"
        )
        assert "test_it.py::test_it: the marker is devices(" in out, out


def test_the_plugin_imports_neither_jax_nor_axisrules_until_a_test_asks(tmp_path):
    test = 'import sys\ndef test_it():\n assert not {"jax", "axisrules", "hypothesis"} & set(sys.modules)'
    assert "1 passed" in run_pytest(tmp_path, "-p", "no:hypothesispytest", "-p", "no:jaxtyping", test_it=test)


def test_the_entry_point_is_enough_and_naming_the_plugin_as_well_does_no_harm(tmp_path, monkeypatch):
    info = tmp_path / "path" / "plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\naxisrules_pytest = axisrules_pytest\n")
    monkeypatch.setenv("PYTHONPATH", str(info.parent))
    assert "@pytest.mark.devices(count" in run_pytest(tmp_path, "--markers")
    command = [sys.executable, "-m", "pytest", "--markers"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.count("@pytest.mark.devices(count") == 1, done.stderr


def test_the_marker_is_documented(tmp_path):
    assert "@pytest.mark.devices(count, mesh='data=-1'" in run_pytest(tmp_path, "--markers")
