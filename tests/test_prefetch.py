"""`prefetch`: order, overlap, bounds, errors, and that its thread always ends."""

import gc
import itertools
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_types import AUTO_FIRST, AXIS_TYPES
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar
from axisrules import _prefetch
from axisrules._batches import place_batch
from axisrules._compat import enable_x64

RULES = {"batch": "data"}


@pytest.fixture(params=AUTO_FIRST)
def axis_types(request):
    """Where a test is about the thread, which knows nothing of meshes, Auto axes do at first."""
    return request.param


every_mesh = pytest.mark.parametrize("axis_types", AXIS_TYPES)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while (left := threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "axisrules.prefetch"]


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def loader(count=None, size=8):
    for step in itertools.count() if count is None else range(count):
        yield {"x": np.full((size, 2), step, np.float32)}


def steps(batches):
    return [int(np.asarray(batch["x"])[0, 0]) for batch in batches]


def run(batches, mesh, names="batch _", **options):
    return ar.prefetch(batches, names, mesh=mesh, rules=RULES, **options)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_all_batches_come_in_order(mesh, size, count):
    assert steps(run(loader(count), mesh, size=size)) == list(range(count))


@every_mesh
def test_batches_lie_where_the_rules_say(mesh):
    (batch,) = run(loader(1), mesh)
    assert batch["x"].sharding == NamedSharding(mesh, P("data", None))


def test_any_iterable_serves(mesh):
    assert steps(run(list(loader(3)), mesh)) == [0, 1, 2]
    assert steps(run(iter(tuple(loader(3))), mesh)) == [0, 1, 2]
    with pytest.raises(TypeError, match="not iterable"):
        run(3, mesh)


def test_infinite_batches_serve(mesh):
    with run(loader(), mesh) as batches:
        assert steps(itertools.islice(batches, 20)) == list(range(20))


@pytest.fixture
def placed(monkeypatch):
    """The batches that lie on the devices, in order."""
    found = []

    def noting(batch, *args):
        result = place_batch(batch, *args)
        assert all(
            array.is_ready() for array in jax.tree.leaves(result.result) if isinstance(array, jax.Array)
        )
        found.append(int(batch["x"][0, 0]))
        return result

    monkeypatch.setattr(_prefetch, "place_batch", noting)
    return found


def test_the_next_batch_is_placed_when_a_step_starts(mesh, placed):
    @jax.jit
    def step(weights, x):
        return jax.lax.fori_loop(0, 60, lambda _, w: jnp.tanh(w @ w) + x.mean(), weights)

    weights, count = jnp.ones((256, 256)), 8
    with run(loader(count), mesh, size=2) as batches:
        until(lambda: len(placed) == 2)
        for number, batch in enumerate(batches):
            assert placed[: number + 2] == list(range(min(number + 2, count)))
            weights = jax.block_until_ready(step(weights, batch["x"]))
            until(lambda number=number: len(placed) == min(number + 3, count))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_more_batches_are_taken_than_asked_for(mesh, size):
    taken = []

    def noting():
        for batch in loader():
            taken.append(None)
            yield batch

    with run(noting(), mesh, size=size) as batches:
        until(lambda: len(taken) == size)
        time.sleep(0.05)
        assert len(taken) == size
        next(batches)
        until(lambda: len(taken) == size + 1)
        time.sleep(0.05)
        assert len(taken) == size + 1


def test_batches_are_loaded_while_a_step_runs(mesh, placed):
    in_step = threading.Event()

    def waiting():
        for number, batch in enumerate(loader(4)):
            assert number == 0 or in_step.wait(20)
            in_step.clear()
            yield batch

    for number, _ in enumerate(run(waiting(), mesh)):
        in_step.set()  # the step begins, and ends once the next batch lies on the devices
        until(lambda number=number: len(placed) == min(number + 2, 4))


def test_an_error_of_the_loader_comes_after_the_good_batches(mesh):
    def failing():
        yield from loader(3)
        raise OSError("disk")

    batches = run(failing(), mesh, size=8)
    time.sleep(0.1)
    assert steps(itertools.islice(batches, 3)) == [0, 1, 2]
    with pytest.raises(OSError, match="disk") as caught:
        next(batches)
    assert any(entry.name == "failing" for entry in caught.traceback)
    assert list(batches) == []


def test_a_batch_that_does_not_fit_is_an_error_in_its_place(mesh):
    closed = []

    def odd():
        try:
            yield from loader(2)
            yield from loader(1, size=6)
            yield from loader(1)
        finally:
            closed.append(True)

    batches = run(odd(), mesh)
    assert steps(itertools.islice(batches, 2)) == [0, 1]
    with pytest.raises(ar.BatchError, match="6 records do not divide"):
        next(batches)
    assert closed == [True]
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration])
def test_no_kind_of_error_is_lost(mesh, error):
    class Odd:
        def __iter__(self):
            return self

        def __next__(self):
            raise error

    if error is StopIteration:
        assert list(run(Odd(), mesh)) == []
        return
    batches = run(Odd(), mesh)
    with pytest.raises(error):
        next(batches)


@every_mesh
def test_padding_gives_a_mask_with_every_batch(mesh):
    batches = [*loader(2), *loader(1, size=6)]
    masks = [mask for _, mask in run(batches, mesh, remainder="pad")]
    assert [np.asarray(mask).sum() for mask in masks] == [8, 8, 6]
    assert {mask.sharding for mask in masks} == {NamedSharding(mesh, P("data"))}


@every_mesh
def test_dropping_leaves_out_a_batch_of_which_nothing_is_left(mesh):
    batches = [*loader(2), *loader(1, size=6), *loader(1, size=3), *loader(1)]
    assert [batch["x"].shape[0] for batch in run(batches, mesh, remainder="drop")] == [8, 8, 4, 8]


@every_mesh
def test_the_thread_has_the_mesh_the_rules_and_x64_of_the_caller(mesh):
    seen = []

    def curious():
        seen.append((ar.get_logical_axis_rules(), jax.sharding.get_abstract_mesh().axis_names))
        seen.append(jnp.asarray(np.int64(1)).dtype)
        yield {"x": np.full((8, 1), 2**40)}

    with jax.set_mesh(mesh), ar.map_logical_axis_names(RULES), enable_x64(True):
        batches = ar.prefetch(curious(), "batch _")
    batch = next(batches)
    assert batch["x"].sharding == NamedSharding(mesh, P("data", None))
    assert batch["x"].dtype == jnp.int64
    assert seen == [(ar.Rules(RULES), mesh.axis_names), jnp.int64]


@every_mesh
def test_what_is_active_later_changes_nothing(mesh):
    batches = run(loader(6), mesh, size=1)
    next(batches)
    with jax.set_mesh(ar.make_mesh("data=2,model=4")), ar.map_logical_axis_names({"batch": "model"}):
        assert all(batch["x"].sharding == NamedSharding(mesh, P("data", None)) for batch in batches)


def test_missing_mesh_rules_and_bad_options_are_errors_of_the_call(mesh):
    with pytest.raises(ar.NoMeshError):
        ar.prefetch(loader(1), "batch", rules=RULES)
    with pytest.raises(ar.NoMeshError):
        ar.prefetch(loader(1), "batch", rules=RULES, mesh="data=4")
    with pytest.raises(ar.NoRulesError):
        ar.prefetch(loader(1), "batch", mesh=mesh)
    for size in [0, -1, 1.5, True, None]:
        with pytest.raises(ar.PolicyError, match="no number of batches"):
            run(loader(1), mesh, size=size)
    with pytest.raises(ar.PolicyError, match="remainder"):
        run(loader(1), mesh, remainder="keep")


def test_unknown_names_warn_once_where_the_batches_are_used(mesh):
    with pytest.warns(ar.UnmappedAxisWarning, match="'btach'") as caught:
        assert len(list(run(loader(4), mesh, names="btach _"))) == 4
    assert len(caught) == 1
    assert caught[0].filename == __file__


@every_mesh
def test_the_loader_may_use_one_buffer_for_all_batches(mesh):
    def reusing():
        buffer, host = np.zeros((8, 2), np.float32), np.zeros(2)
        for step in range(6):
            buffer[:], host[:] = step, step
            yield {"x": buffer, "host": host}

    found = list(run(reusing(), mesh, names={"x": "batch _"}, size=4))
    assert steps(found) == list(range(6))
    assert [batch["host"][0] for batch in found] == list(range(6))


# Ends.


def test_closing_ends_the_thread_and_closes_the_generator(mesh):
    closed = []

    def noting():
        try:
            yield from loader()
        finally:
            closed.append(threading.current_thread().name)

    batches = run(noting(), mesh)
    next(batches)
    batches.close()
    assert closed == ["axisrules.prefetch"]
    assert not threads()
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()


def test_leaving_a_with_block_closes(mesh):
    with run(loader(), mesh) as batches:
        next(batches)
    assert not threads()


def test_an_error_in_closing_the_loader_is_raised(mesh):
    def stubborn():
        try:
            yield from loader()
        finally:
            raise OSError("cannot close")

    batches = run(stubborn(), mesh)
    next(batches)
    with pytest.raises(OSError, match="cannot close"):
        batches.close()
    batches.close()


def test_an_error_in_closing_is_not_lost_where_nobody_closes(mesh, monkeypatch):
    class Loader:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.batches)

        def close(self):
            raise OSError("cannot close")

    batches = run(Loader(loader(1)), mesh)
    next(batches)
    with pytest.raises(OSError, match="cannot close"):
        next(batches)
    batches = run(Loader(map(int, "x")), mesh)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        next(batches)
    assert "cannot close" in caught.value.__notes__[0]
    shown = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(str(args.exc_value)))
    batches = run(Loader(loader()), mesh)
    next(batches)
    del batches
    until(lambda: shown == ["cannot close"])


def test_a_loop_that_is_left_ends_the_thread(mesh):
    for _ in run(loader(), mesh):
        break
    until(lambda: not threads())


def test_an_iterator_that_is_forgotten_is_collected(mesh):
    batches = run(loader(), mesh)
    held = weakref.ref(batches)
    del batches
    gc.collect()
    assert held() is None
    until(lambda: not threads())


def test_a_batch_that_was_used_is_not_kept(mesh, placed):
    with run(loader(2), mesh, size=1) as batches:
        held = weakref.ref(next(batches)["x"])
        until(lambda: len(placed) == 2)
        gc.collect()
        assert held() is None


def test_closing_wakes_a_thread_that_waits_for_a_batch(mesh):
    release = threading.Event()

    def stuck():
        release.wait(20)
        yield from loader(1)

    batches = run(stuck(), mesh)
    found = []
    waiting = threading.Thread(target=lambda: found.append(next(batches, "the end")))
    waiting.start()
    time.sleep(0.05)
    threading.Timer(0.2, release.set).start()
    batches.close()
    waiting.join(5)
    assert found == ["the end"]


def test_many_iterators_at_once_do_not_mix(mesh):
    many = [run(loader(5), mesh) for _ in range(4)]
    assert [steps(row) for row in zip(*many, strict=True)] == [[step] * 4 for step in range(5)]


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "del batches"])
def test_the_interpreter_exits_while_a_thread_is_at_work(ending):
    code = f"""
        import itertools, time, jax, numpy as np, axisrules as ar
        jax.config.update("jax_platforms", "cpu"); jax.config.update("jax_num_cpu_devices", 8)
        loader = ({{"x": np.full((64, 512), n, np.float32)}} for n in itertools.count())
        batches = ar.prefetch(loader, "batch _", mesh=ar.make_mesh("data=8"), rules={{"batch": "data"}})
        next(batches)
        {ending}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_interpreter_exits_while_the_loader_is_stuck():
    code = """
        import time, jax, numpy as np, axisrules as ar
        jax.config.update("jax_platforms", "cpu"); jax.config.update("jax_num_cpu_devices", 8)
        def loader():
            yield {"x": np.zeros(8, np.float32)}
            time.sleep(1000)
        batches = ar.prefetch(loader(), "batch", mesh=ar.make_mesh("data=8"), rules={"batch": "data"})
        next(batches)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
