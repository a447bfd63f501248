"""Meshes from text, and shardings from axes."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar

BAD = {
    "": "cannot read '' at position 0",
    "data": "cannot read 'data' at position 0",
    "data=4,": "cannot read '' at position 7",
    "data=4,model:2": "cannot read 'model:2' at position 7",
    "data=four": "cannot read 'data=four' at position 0",
    "data=2.0": "cannot read",
    "=4": "cannot read",
    "data=4,data=2": "has axis 'data' twice, again at position 7",
    "data=0": "has size 0",
    "data=-2": "has size -2",
    "data=16": "needs 16 devices, and there are 8",
    "data=3,model=-1": "3 does not divide 8",
    "data=-1,model=-1": "axes 'data' and 'model' are both -1",
    "data=16,model=-1": "does not fill 8 devices",
}


@pytest.mark.parametrize("text", BAD)
def test_a_mesh_text_that_does_not_do_says_where_and_why(text):
    with pytest.raises(ar.MeshError) as caught:
        ar.make_mesh(text)
    assert BAD[text] in str(caught.value)


@pytest.mark.parametrize(("axes", "sizes"), [
    ("data=4,model=2", {"data": 4, "model": 2}),
    (" data = 4 , model=-1 ", {"data": 4, "model": 2}),
    ({"data": -1}, {"data": 8}),
    ("data=2,model=1", {"data": 2, "model": 1}),
])  # fmt: skip
def test_sizes_fill_in_and_types_are_always_stated(axes, sizes):
    mesh = ar.make_mesh(axes)
    assert dict(mesh.shape) == sizes
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_axis_types_by_word_by_value_and_by_axis():
    assert set(ar.make_mesh("a=4,b=2", axis_types="explicit").axis_types) == {AxisType.Explicit}
    assert set(ar.make_mesh("a=4,b=2", axis_types=AxisType.Manual).axis_types) == {AxisType.Manual}
    mixed = ar.make_mesh("a=4,b=2", axis_types={"b": "Explicit"})
    assert mixed.axis_types == (AxisType.Auto, AxisType.Explicit)
    with pytest.raises(ar.MeshError, match="'explict' is unknown; did you mean 'explicit'"):
        ar.make_mesh("a=8", axis_types="explict")
    with pytest.raises(ar.MeshError, match="names 'c', which is no axis"):
        ar.make_mesh("a=8", axis_types={"c": "auto"})


def test_devices_may_be_given():
    mesh = ar.make_mesh("a=-1", devices=jax.devices()[4:])
    assert list(mesh.devices.flat) == jax.devices()[4:]


@pytest.mark.parametrize("mesh", [3, ["data"], {"data": "4"}, {"data": 0}, {1: 2}, {"": 2}, {"data": True}])
def test_what_spells_no_mesh_is_refused(mesh):
    with pytest.raises(ar.MeshError):
        ar.plan({"w": np.zeros(8, np.float32)}, {"w": None}, mesh=mesh, rules={})


@pytest.mark.parametrize("mesh", ["", "  ", {}, Mesh(np.array(jax.devices()[0]), ())])
def test_an_empty_mesh_is_no_mesh(mesh):
    with pytest.raises(ar.NoMeshError):
        ar.plan({"w": np.zeros(8, np.float32)}, {"w": None}, mesh=mesh, rules={})


def test_shardings_are_made_from_axes_and_checked():
    mesh = ar.make_mesh("data=4,model=2")
    assert ar.create_named_sharding(mesh, "data", None, ["model"]) == NamedSharding(
        mesh, P("data", None, "model")
    )
    with pytest.raises(ar.AbsentAxisError, match="no axis 'modle'; did you mean 'model'"):
        ar.create_named_sharding(mesh, "data", "modle")
    with pytest.raises(ar.MeshError, match="'data' stands twice"):
        ar.create_named_sharding(mesh, "data", ("model", "data"))
    with pytest.raises(ar.MeshError, match="entry 1 is 3"):
        ar.create_named_sharding(mesh, "data", 3)
