"""The whole text of at least one message of every error class."""

import textwrap
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import _errors, _processes, cost
from axisrules._shares import share_of

MESH = "data=4,model=2"
RULES = {"embed": "data", "mlp": "model"}


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def planned(tree, names, mesh=MESH, rules=RULES, **options):
    return lambda: ar.plan(tree, names, mesh=mesh, rules=rules, **options)


def resolved(names, shape=None, mesh=MESH, rules=RULES, **options):
    return lambda: ar.resolve(names, shape, mesh=mesh, rules=rules, **options)


ATTENTION = {f"layers_{i}": {"key": {"kernel": zeros(8, 4, 16)}} for i in range(32)}
ATTENTION_NAMES = {f"layers_{i}": {"key": {"kernel": "kv_heads head_dim embed"}} for i in range(32)}
ATTENTION_RULES = [("embed", "data"), ("head_dim", None), ("kv_heads", "model")]
SHARED = zeros(8, 8)


def leave_out_of_order():
    outer, inner = ar.map_logical_axis_names({"a": "x"}), ar.map_logical_axis_names({"b": "x"})
    outer.__enter__()
    inner.__enter__()
    try:
        outer.__exit__(None, None, None)
    finally:
        inner.__exit__(None, None, None)


def raise_(error):
    raise error


MESSAGES = [
    (
        ar.DivisibilityError,
        planned(ATTENTION, ATTENTION_NAMES, mesh="data=4,model=16", rules=ATTENTION_RULES),
        """
        dimension 0 ('kv_heads', size 8) does not divide over model=16
          at:    layers_0/key/kernel      (and 31 more with the same names and shape)
          names: ('kv_heads', 'head_dim', 'embed')    shape: (8, 4, 16)
          mesh:  data=4, model=16
          rule:  #2 kv_heads -> model
          fix:   pass indivisible="next" (then: P(None, None, 'data')), or prepend a rule for kv_heads whose axes divide 8.
        """,
    ),
    (
        ar.DivisibilityError,
        resolved("heads", (4,), mesh="replica=2,data=4", rules={"heads": ("replica", "data")}),
        """
        dimension 0 ('heads', size 4) does not divide over replica=2 * data=4 = 8
          names: ('heads',)    shape: (4,)
          mesh:  replica=2, data=4
          rule:  #0 heads -> (replica, data)
          fix:   pass indivisible="next" (then: P(None)), or prepend a rule for heads whose axes divide 4.
        """,
    ),
    (
        ar.AxisTakenError,
        resolved("embed mlp", (8, 8), rules={"embed": "data", "mlp": "data"}, taken="error"),
        """
        dimensions 0 ('embed') and 1 ('mlp') both want mesh axis 'data'
          names: ('embed', 'mlp')    shape: (8, 8)
          mesh:  data=4, model=2
          rule:  #1 mlp -> data
          fix:   pass taken="next", or give mlp a rule with another axis.
        """,
    ),
    (
        ar.AbsentAxisError,
        resolved("embed", (8,), rules={"embed": "modle"}),
        """
        the mesh has no axis 'modle'; did you mean 'model'?
          names: ('embed',)    shape: (8,)
          mesh:  data=4, model=2
          rule:  #0 embed -> modle
          fix:   correct the rule, or pass absent="drop" to leave out what the mesh lacks.
        """,
    ),
    (
        ar.UnknownNameError,
        planned({"ffn": {"up": zeros(8, 8)}}, {"ffn": {"up": "embed mlpp"}}, unmapped="error"),
        """
        no rule mentions 'mlpp', the name of dimension 1; did you mean 'mlp'?
          at:    ffn/up
          names: ('embed', 'mlpp')    shape: (8, 8)
          mesh:  data=4, model=2
          fix:   add a rule for it, ('mlpp', None) where it is whole on purpose, or pass unmapped="replicate".
        """,
    ),
    (
        ar.RepeatedNameError,
        planned({"proj": {"w": zeros(8, 8)}}, {"proj": {"w": "embed embed"}}),
        """
        dimensions 0 and 1 are both named 'embed'
          at:    proj/w
          names: ('embed', 'embed')
          fix:   rename one of them, for example 'embed_out', and give it a rule.
        """,
    ),
    (
        ar.RankError,
        planned({"blocks": {"kernel": zeros(3, 8, 8)}}, {"blocks": {"kernel": "embed mlp"}}),
        """
        2 names for 3 dimensions
          at:    blocks/kernel
          names: ('embed', 'mlp')    shape: (3, 8, 8)
          fix:   give one name, or None, per dimension. One dimension of size 3 more than names: a stacked axis?
        """,
    ),
    (
        ar.NamesError,
        lambda: ar.logical_to_mesh_axes(("embed", 3)),
        """
        the name of dimension 1 is 3, which is neither a name nor None
          names: ('embed', 3)
          fix:   write a name or None for dimension 1.
        """,
    ),
    (
        ar.MissingNamesError,
        planned({"a": zeros(8, 8), "b": zeros(8, 8, 8), "c": zeros(8)}, {"a": "embed mlp"}),
        """
        2 arrays have no names
          at:    b  (8, 8, 8)  2,048 bytes, 87.7% of all
                 c  (8,)  32 bytes, 1.4% of all
          fix:   add names, such as "_ _ _" at b, or pass unnamed="replicate".
        """,
    ),
    (
        ar.ExtraNamesError,
        planned({"a": {"kernel": zeros(8, 8)}}, {"a": {"kernel": "embed mlp", "bias": "mlp"}}),
        """
        names are given for 1 path without a leaf
          at:    a/bias
          fix:   remove them, or correct the path.
        """,
    ),
    (
        ar.UnconstrainedError,
        planned({"w": zeros(8, 8)}, {"w": "* embed"}),
        """
        dimension 0 is unconstrained, which is no layout
          at:    w
          names: (UNCONSTRAINED, 'embed')
          fix:   name the dimension or write None; only a constraint may leave it open.
        """,
    ),
    (
        ar.SpecError,
        planned({"w": zeros(6, 8)}, {"w": P("data")}),
        """
        dimension 0 (size 6) does not divide over data=4
          at:    w
          shape: (6, 8)
          mesh:  data=4, model=2
          fix:   choose axes that divide 6.
        """,
    ),
    (
        ar.TiedError,
        planned({"embed": SHARED, "head": SHARED}, {"embed": "embed mlp", "head": "mlp embed"}),
        """
        one array has the names ('embed', 'mlp') and ('mlp', 'embed')
          at:    embed
                 head
          shape: (8, 8)
          fix:   give both paths the same names, or copy the array to untie them.
        """,
    ),
    (
        ar.LeafError,
        planned({"w": zeros(8, dtype=np.float64)}, {"w": "embed"}),
        """
        a float64 array would lose precision: x64 is off
          at:    w
          shape: (8,)
          fix:   cast it, x.astype("float32"), or pass dtype="float32" to plan and shard_tree, or call jax.config.update("jax_enable_x64", True).
        """,
    ),
    (
        ar.LeafError,
        planned({"ids": np.array([2**40])}, {"ids": None}),
        """
        the value 1099511627776 of an int64 array does not fit int32: x64 is off
          at:    ids
          shape: (1,)
          fix:   call jax.config.update("jax_enable_x64", True), or take the array out of the tree.
        """,
    ),
    (
        ar.NoMeshError,
        planned({"w": zeros(8)}, {"w": "embed"}, mesh=None),
        """
        no mesh was given, and none is active
          fix:   pass mesh=axisrules.make_mesh("data=4,model=2"), or enter `with jax.set_mesh(mesh):`.
        """,
    ),
    (
        ar.NoRulesError,
        planned({"w": zeros(8)}, {"w": "embed"}, rules=None),
        """
        no rules were given, and none are active
          fix:   pass rules={"embed": "fsdp"}, or enter `with axisrules.map_logical_axis_names(...):`.
        """,
    ),
    (
        ar.MeshError,
        planned({"w": zeros(8)}, {"w": "embed"}, mesh="data=4,model:2"),
        """
        cannot read 'model:2' at position 7 of mesh 'data=4,model:2'
          fix:   write axes with their sizes, like "data=4,model=2".
        """,
    ),
    (
        ar.PolicyError,
        resolved("embed", (8,), indivisible="nxt"),
        """
        indivisible='nxt' is no policy; did you mean 'next'?
          fix:   pass indivisible='error' or 'next' or 'partial'.
        """,
    ),
    (
        ar.RulesError,
        lambda: ar.Rules(["ab"]),
        """
        rule #0 is 'ab', not a pair of a name and mesh axes
          fix:   write pairs like ("embed", "fsdp") or ("batch", ("data", "fsdp")).
        """,
    ),
    (
        ar.NameTableError,
        lambda: ar.NameTable({"**/kernel": ("embed", 1)}),
        """
        entry #0 (**/kernel): the name of dimension 1 is 1, which is neither a name nor None
          fix:   write a name or None for dimension 1.
        """,
    ),
    (
        ar.ScopeError,
        leave_out_of_order,
        """
        these rules are left while others, entered later, are still active
          fix:   leave the inner `with` first; of overlapping generators or asyncio tasks, decorate the function with map_logical_axis_names, or pass rules=.
        """,
    ),
    (
        ar.ConstraintError,
        lambda: ar.constrain(
            zeros(8, 8), "* embed", mesh=ar.make_mesh(MESH, axis_types="explicit"), rules=RULES
        ),
        """
        dimension 0 is unconstrained, and every axis of the mesh is Explicit
          mesh:  data=4, model=2
          fix:   name the dimension or write None: on Explicit axes a layout is part of the type.
        """,
    ),
    (
        ar.StateError,
        lambda: ar.state_names({"mu": {"kernal": zeros(8, 12)}}, {"kernel": zeros(8, 12)}, {"kernel": "a b"}),
        """
        an array of the state belongs to no parameter: none has a path that ends this one; the nearest is 'kernel'
          at:    mu/kernal
          shape: (8, 12)
          fix:   pass the parameters that the state was made from, or leave this array out of the state here and name it by hand, such as "_ _" at mu/kernal.
        """,
    ),
    (
        ar.StateError,
        lambda: ar.state_names({"mu": {"kernel": zeros(5, 7)}}, {"kernel": zeros(8, 12)}, {"kernel": "a b"}),
        """
        the shape of an array of the state does not follow from (8, 12), the shape of its parameter 'kernel'
          at:    mu/kernel
          shape: (5, 7)
          fix:   pass the parameters that the state was made from, or leave this array out of the state here and name it by hand, such as "_ _" at mu/kernel.
        """,
    ),
    (
        ar.BatchError,
        lambda: ar.shard_batch(
            {"x": zeros(10, 6), "y": zeros(10)},
            "batch _",
            mesh=ar.make_mesh(MESH),
            rules={"batch": ("data", "model")},
        ),
        """
        the 10 records do not divide over data=4 * model=2 = 8
          at:    x      (and 1 more)
          mesh:  data=4, model=2
          fix:   pass remainder="drop" (then: 8 records) or "pad" (then: 16, and a mask).
        """,
    ),
    (
        ar.ProcessError,
        lambda: share_of([[0, 0], [0, 1], [1, 1]], ("data", "model"), ("data",), 0),
        """
        the processes hold no equal, separate shares of a dimension over data
          at:    process 0: parts 0, 1 of 3
                 process 1: parts 1, 2 of 3
          mesh:  data=3, model=2
          fix:   order the devices of the mesh by process, as axisrules.make_mesh does.
        """,
    ),
    (
        ar.ProcessError,
        lambda: raise_(
            _processes._disagreement(
                {
                    process: {"rules": f"embed -> {axis}"}
                    for process, axis in enumerate(("data", "data", "model"))
                }
            )
        ),
        """
        process 2 would do something else than process 0: other rules
          at:    process 0: rules: embed -> data
                 process 2: rules: embed -> model
          fix:   call it with the same arguments on all processes, or pass check=False.
        """,
    ),
    (
        ar.CheckpointError,
        lambda: ar.checkpoints.open("no/such.safetensors"),
        """
        cannot read no/such.safetensors: No such file or directory
          at:    no/such.safetensors
          fix:   pass the path of a file that can be read.
        """,
    ),
    (
        ar.CatalogError,
        lambda: ar.catalog.load("lama"),
        """
        the catalog has no table 'lama'; did you mean 'llama'?
          fix:   catalog.names() lists them; catalog.guess(tree) finds one; NameTable.load(path) reads a table of your own.
        """,
    ),
    (
        ar.LayoutError,
        lambda: planned({"a": zeros(8, 8), "b": zeros(8, 8)}, {"a": "embed mlp", "b": None})().check(
            max_replicated=0.02
        ),
        """
        0.5 of all bytes are replicated, more than max_replicated=0.02
          at:    b  256 bytes per device
          mesh:  data=4, model=2
          fix:   give these arrays rules that split them, or raise the limit.
        """,
    ),
    (
        ar.PlanError,
        planned({"a": zeros(6, 8), "b": zeros(8, 8)}, {"a": "embed mlp", "b": "embed"}),
        """
        2 problems in 2 leaves
          DivisibilityError: dimension 0 ('embed', size 6) does not divide over data=4
            at:    a
            names: ('embed', 'mlp')    shape: (6, 8)
            mesh:  data=4, model=2
            rule:  #0 embed -> data
            fix:   pass indivisible="next" (then: P(None, 'model')), or prepend a rule for embed whose axes divide 6.
          RankError: 1 name for 2 dimensions
            at:    b
            names: ('embed',)    shape: (8, 8)
            fix:   give one name, or None, per dimension. One dimension of size 8 more than names: a stacked axis?
        """,
    ),
    (
        ar.HardwareError,
        lambda: cost.measure(len, via="tpu", topology="v5f:2x2"),
        """
        topology 'v5f:2x2' is unknown; did you mean 'v5p'?
          fix:   pass topology= like "v5e:4x4": a family, and the chips along each side of the torus. Families: v2, v3, v4, v5e, v5p, v6e, tpu7x.
        """,
    ),
    (
        ar.InitError,
        lambda: ar.init({"w": zeros(8, 4)}, {"w": "embed mlp"}, mesh=MESH, rules=RULES),
        """
        a dict is not a function that makes a tree
          fix:   pass the function, as in axisrules.init(lambda: Model(...)); for arrays that exist there is axisrules.shard_tree.
        """,
    ),
]


@pytest.mark.parametrize(
    ("cls", "call", "text"), MESSAGES, ids=[f"{n}-{cls.__name__}" for n, (cls, _, _) in enumerate(MESSAGES)]
)
def test_message_reads_as_designed(cls, call, text):
    with pytest.raises(ar.AxisRulesError) as caught:
        call()
    assert type(caught.value) is cls
    shown = str(caught.value).replace("PartitionSpec.UNCONSTRAINED", "UNCONSTRAINED")
    assert shown == textwrap.dedent(text).strip()


def test_every_error_class_has_a_message_here():
    classes = {c for c in vars(_errors).values() if isinstance(c, type) and issubclass(c, ar.AxisRulesError)}
    covered = {cls for cls, _, _ in MESSAGES}
    elsewhere = {ar.AxisRulesError, ar.MissingExtraError}  # the base, and test_files.py
    assert classes == covered | elsewhere


def test_errors_are_value_errors_of_the_package_itself():
    with pytest.raises(ValueError, match="does not divide") as caught:
        resolved("embed", (6,))()
    assert type(caught.value).__module__ == "axisrules"


def test_facts_of_an_error_are_attributes():
    with pytest.raises(ar.DivisibilityError) as caught:
        planned(ATTENTION, ATTENTION_NAMES, mesh="data=4,model=16", rules=ATTENTION_RULES)()
    error = caught.value
    assert (error.path, len(error.paths)) == ("layers_0/key/kernel", 32)
    assert (error.dim, error.name, error.size, error.axes, error.rule) == (0, "kv_heads", 8, ("model",), 2)
    assert error.shape == (8, 4, 16)
    assert error.mesh == {"data": 4, "model": 16}
    assert error.fix.startswith('pass indivisible="next"')


def test_errors_survive_pickling():
    import pickle

    with pytest.raises(ar.PlanError) as caught:
        planned({"a": zeros(6, 8), "b": zeros(8, 8)}, {"a": "embed mlp", "b": "embed"})()
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert [type(one) for one in again.failures] == [ar.DivisibilityError, ar.RankError]


def test_unknown_names_warn_once_per_plan_with_leaves_bytes_and_the_nearest_name():
    tree = {"a": zeros(8, 8), "b": zeros(8), "c": zeros(8)}
    names = {"a": "embed mlpp", "b": "mlpp", "c": "other"}
    with pytest.warns(ar.UnmappedAxisWarning) as caught:
        planned(tree, names)()
    (warning,) = caught
    assert str(warning.message) == (
        "no rule mentions 'mlpp' (did you mean 'mlp'?), 'other': the dimension stays whole in 3 leaves "
        "of 320 bytes: a, b, c. Add a rule, (name, None) where that is on purpose, or pass "
        'unmapped="replicate".'
    )
    assert warning.filename == __file__


def test_names_in_lists_warn_as_those_in_tuples_do():
    with pytest.warns(ar.UnmappedAxisWarning, match="'mlpp'.* in 1 leaf of 256 bytes: a"):
        planned({"a": zeros(8, 8)}, {"a": ["embed", "mlpp"]})()


def test_many_failures_are_listed_up_to_a_limit_and_kept_whole_as_data():
    tree = {f"w{i}": zeros(6, i + 1) for i in range(50)}
    with pytest.raises(ar.DivisibilityError) as caught:
        planned(tree, dict.fromkeys(tree, "embed _"))()
    assert len(caught.value.failures) == 50
    assert str(caught.value).endswith("... and 30 more, in .failures")


def test_no_message_depends_on_the_jax_version_for_specs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "P('data', None)" in str(ar.resolve("embed other", (8, 8), mesh=MESH, rules=RULES))
    assert jax.__version__
