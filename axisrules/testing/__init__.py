"""Testing rules of one's own: strategies for hypothesis, assertions about plans, simulated devices.

Re-exports; it holds no logic. The strategies need the extra ``testing``; what else is here needs
nothing. The pytest plugin is the package ``axisrules_pytest``.

Example:
    Claims about a rule set, tried on every mesh of 8 to 1,024 devices:

    >>> import axisrules as ar
    >>> from hypothesis import given, settings
    >>> rules = ar.Rules({"batch": "data", "mlp": "model", "vocab": "model", "embed": "data"})
    >>> @settings(max_examples=20, deadline=None, database=None)
    ... @given(mesh=ar.testing.meshes(rules, min_devices=8, max_devices=1024))
    ... def no_weight_over_1_mib_is_whole(mesh):
    ...     params = {"up/kernel": jax.ShapeDtypeStruct((4096, 16384), np.float32)}
    ...     plan = ar.plan(params, {"up/kernel": "embed mlp"}, mesh=mesh, rules=rules)
    ...     assert not [one for one in plan.placements if one.ways == 1 and one.nbytes > 2**20]
    ...     ar.testing.assert_split(plan, "**/kernel", over=("data", "model"))
    >>> import jax, numpy as np
    >>> no_weight_over_1_mib_is_whole()

    No rule is dead, on any mesh of its axes:

    >>> [one.code for one in ar.report.lint(rules) if one.code == "dead_rule"]
    []
"""

from axisrules.testing._assertions import assert_fits as assert_fits
from axisrules.testing._assertions import assert_matches as assert_matches
from axisrules.testing._assertions import assert_no_axis_twice as assert_no_axis_twice
from axisrules.testing._assertions import assert_split as assert_split
from axisrules.testing._devices import simulate_devices as simulate_devices
from axisrules.testing._strategies import axis_names as axis_names
from axisrules.testing._strategies import meshes as meshes
from axisrules.testing._strategies import rules as rules
from axisrules.testing._strategies import shapes as shapes
from axisrules.testing._tree_strategies import trees as trees
