"""Drawings of tiles: every element is in exactly the tiles that the sharding says."""

import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from strategies import arrays, meshes, policies, rules

import axisrules as ar
from axisrules.report import draw

LENIENT = {"indivisible": "next", "absent": "drop", "unmapped": "replicate"}


def placement(names, shape, mesh, some_rules, **options):
    leaf = jax.ShapeDtypeStruct(shape, "int8")
    (found,) = ar.plan(leaf, names, mesh=mesh, rules=some_rules, **{**LENIENT, **options}).placements
    return found


def holders_by_element(drawing):
    """Per element, the devices that hold it."""
    found = {}
    for tile in drawing.tiles:
        for element in np.ndindex(*(stop - start for start, stop in tile.index)):
            at = tuple(start + offset for (start, _), offset in zip(tile.index, element, strict=True))
            assert at not in found, "tiles do not overlap"
            found[at] = set(tile.devices)
    return found


def holders_by_jax(sharding, shape):
    found = {at: set() for at in np.ndindex(*shape)}
    for device, index in sharding.devices_indices_map(shape).items():
        for at in np.ndindex(*shape):
            if all(at[dim] in range(*part.indices(shape[dim])) for dim, part in enumerate(index)):
                found[at].add(device.id)
    return found


@given(one=arrays(max_rank=3), some_rules=rules, options=policies)
def test_every_element_is_in_the_tiles_that_the_sharding_says(one, some_rules, options):
    names, shape = one
    mesh = ar.make_mesh("x=2,y=2,z=2")
    found = placement(names, shape, mesh, some_rules, **options)
    drawn = draw(found)
    assert (drawn.numbered, len(drawn.holders)) == ("position", found.ways)
    sharding = NamedSharding(mesh, found.spec)
    assert holders_by_element(drawn) == holders_by_jax(sharding, shape)
    with_ids = draw(jax.ShapeDtypeStruct(shape, "int8", sharding=sharding))
    assert (with_ids.numbered, with_ids.holders) == ("id", drawn.holders)


@given(one=arrays(), some_rules=rules, mesh=meshes(), options=policies)
def test_tiles_of_any_mesh_hold_every_device_once_and_are_the_parts(one, some_rules, mesh, options):
    names, shape = one
    found = placement(names, shape, mesh, some_rules, **options)
    drawn = draw(found)
    devices = [device for some in drawn.holders for device in some]
    assert sorted(devices) == list(range(int(np.prod(list(mesh.values())))))
    for tile in drawn.tiles:
        assert tuple(stop - start for start, stop in tile.index) == found.shard_shape
    assert list(drawn.tiles)[-1] == drawn.tile([count - 1 for count in drawn.counts])
    assert len(str(drawn).splitlines()) <= 3 + 16
    ElementTree.fromstring(drawn.svg())


def test_a_drawing_reads_as_designed():
    found = placement("heads embed kv", (4, 8, 6), "data=2,model=4", {"embed": "data", "heads": "model"})
    assert (
        str(draw(found))
        == """\
(4, 8, 6) P('model', 'data', None) on data=2, model=4: 8 tiles
cells: the positions of the devices; down: dimensions 0 'heads', 2 'kv', across: dimension 1 'embed'
        0:4  4:8
0:1, :  0    4
1:2, :  1    5
2:3, :  2    6
3:4, :  3    7"""
    )


def test_devices_are_written_short():
    replicated = draw(placement("a", (8,), "x=2,y=64", {"a": "x"}))
    assert str(replicated).endswith("\n  0:4   4:8\n  0-63  64-127")
    strided = draw(placement("a", (8,), "y=64,x=2", {"a": "x"}))
    assert str(strided).endswith("0-126 by 2  1-127 by 2")
    odd = draw(placement("a", (8,), "y=2,x=2,z=3", {"a": "x"}))
    assert "0, 1, 2, ... 8 (6 devices)" in str(odd)


def test_8192_devices_are_summarised():
    found = draw(placement("a b c", (8192, 128, 64), "x=128,y=64", {"a": "x", "c": "y"}))
    text = str(found)
    assert len(found.holders) == 8192
    assert len(text.splitlines()) == 3 + 16
    assert max(map(len, text.splitlines())) < 120
    assert "..." in text
    assert "8128:8192, :" in text
    assert "8191" in text.splitlines()[-1]
    whole = draw(placement("a", (8192,), "x=8192", {}))
    assert "0-8191" in str(whole)
    assert len(draw(placement("a", (8192,), "x=8192", {"a": "x"})).svg()) < 10_000


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (1, 1, 1, 1, 1)])
def test_small_arrays_are_drawn_too(shape):
    drawn = draw(placement((None,) * len(shape), shape, "x=4", {}))
    assert drawn.holders == ((0, 1, 2, 3),)
    assert "0-3" in str(drawn)
    ElementTree.fromstring(drawn.svg())


def test_live_arrays_of_any_sharding_are_drawn_with_their_device_ids():
    mesh = ar.make_mesh("x=4,y=2", devices=list(reversed(jax.devices())))
    array = jax.device_put(np.zeros((8, 2)), NamedSharding(mesh, P("x")))
    assert draw(array).holders == ((6, 7), (4, 5), (2, 3), (0, 1))
    alone = jax.device_put(np.zeros((8, 2)), SingleDeviceSharding(jax.devices()[3]))
    assert draw(alone).holders == ((3,),)
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("x")))
    assert len(draw(keys).holders) == 4


def test_an_abstract_array_on_an_abstract_mesh_is_drawn():
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), P(None, "x"))
    drawn = draw(jax.ShapeDtypeStruct((2, 8), "int8", sharding=sharding))
    assert (drawn.numbered, drawn.holders) == ("position", ((0,), (1,), (2,), (3,)))


def test_the_picture_is_safe_and_alone():
    found = placement(("<b>&", None), (8, 8), "x=4", {"<b>&": "x"})
    picture = draw(found).svg()
    assert "<b>" not in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    root = ElementTree.fromstring(picture)
    rects = [one for one in root.iter() if one.tag.endswith("rect")]
    assert len(rects) == 4
    assert draw(found)._repr_svg_() == picture


@pytest.mark.parametrize(
    "given", [np.zeros(8), 3, None, "array", jax.ShapeDtypeStruct((8,), "int8"), P("x")], ids=str
)
def test_what_has_no_layout_is_refused(given):
    with pytest.raises(ar.SpecError, match="has no layout to draw"):
        draw(given)


@pytest.mark.parametrize(("shape", "spec"), [((6,), P("x")), ((8,), P(None, "x")), ((), P("x"))])
def test_a_sharding_that_does_not_fit_is_refused(shape, spec):
    class Fake:
        sharding = NamedSharding(AbstractMesh((4,), ("x",)), spec)

    Fake.shape = shape
    with pytest.raises(ar.SpecError, match="does not fit the shape"):
        draw(Fake())


def test_a_traced_array_is_refused_or_drawn_but_does_not_crash():
    @jax.jit
    def inside(x):
        with pytest.raises(ar.SpecError):
            draw(x)
        return x

    inside(np.zeros(8, np.float32))
