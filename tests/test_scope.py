"""The active rules: calls, blocks, decorators, threads, traces, generators and tasks."""

import asyncio
import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axisrules as ar

A, B, C = {"a": "x"}, {"b": "y"}, {"c": "z"}


def active():
    return list(ar.get_logical_axis_rules())


def rules(*mappings):
    return [pair for mapping in mappings for pair in mapping.items()]


def test_none_are_active_at_first():
    assert active() == []
    assert ar.get_logical_axis_rules() == ar.Rules()
    assert ar.logical_to_mesh_axes("a b") == P(None, None)


def test_set_replaces_and_get_reads():
    ar.set_logical_axis_rules(A)
    ar.set_logical_axis_rules(tuple(B.items()))
    assert active() == rules(B)
    ar.set_logical_axis_rules(())
    assert active() == []


def test_malformed_rules_change_nothing():
    ar.set_logical_axis_rules(A)
    with pytest.raises(ar.RulesError):
        ar.set_logical_axis_rules([("a", 1)])
    with pytest.raises(ar.RulesError):
        ar.map_logical_axis_names([("a", 1)])
    assert active() == rules(A)
    ar.set_logical_axis_rules(())


def test_a_bare_call_prepends_at_once():
    ar.set_logical_axis_rules(A)
    ar.map_logical_axis_names(B)
    assert active() == rules(B, A)
    ar.set_logical_axis_rules(())


def test_blocks_nest_prepend_and_restore():
    with ar.map_logical_axis_names(A) as inside:
        assert inside == ar.Rules(A)
        with ar.map_logical_axis_names(B):
            assert active() == rules(B, A)
        assert active() == rules(A)
    assert active() == []


def test_the_exit_restores_what_was_active_before_the_call():
    with ar.map_logical_axis_names(A):
        ar.map_logical_axis_names(B)
        ar.set_logical_axis_rules(C)
        assert active() == rules(C)
    assert active() == []


def test_an_object_may_be_made_before_it_is_entered():
    scope = ar.map_logical_axis_names(A)
    assert active() == rules(A)
    with scope:
        assert active() == rules(A)
    assert active() == []


def test_entering_the_same_object_again_prepends_again():
    scope = ar.map_logical_axis_names(A)
    with scope:
        with scope:
            assert active() == rules(A, A)
        assert active() == rules(A)
    assert active() == []
    with scope:
        assert active() == rules(A)
    assert active() == []


def test_an_exception_restores():
    with contextlib.suppress(ZeroDivisionError), ar.map_logical_axis_names(A), ar.map_logical_axis_names(B):
        raise ZeroDivisionError
    assert active() == []


def test_a_decorator_takes_the_call_back_and_enters_for_every_call():
    @ar.map_logical_axis_names(A)
    def function(extra=None):
        """Says what is active."""
        return active() if extra is None else extra()

    assert active() == []
    assert function() == rules(A)
    assert function(function) == rules(A, A)
    assert active() == []
    with ar.map_logical_axis_names(B):
        assert function() == rules(A, B)
    assert (function.__name__, function.__doc__) == ("function", "Says what is active.")


def test_a_decorated_function_that_raises_restores():
    @ar.map_logical_axis_names(A)
    def function():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        function()
    assert active() == []


def test_leaving_a_block_that_is_not_the_innermost_is_an_error_and_heals():
    outer, inner = ar.map_logical_axis_names(A), ar.map_logical_axis_names(B)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ar.ScopeError, match="entered later, are still active"):
        outer.__exit__(None, None, None)
    assert active() == rules(B, A)
    inner.__exit__(None, None, None)
    assert active() == []


def test_leaving_what_was_never_entered_is_an_error():
    scope = ar.map_logical_axis_names(A)
    with pytest.raises(ar.ScopeError, match="not entered"):
        scope.__exit__(None, None, None)
    ar.set_logical_axis_rules(())


def test_a_new_thread_starts_with_none_and_changes_nothing_elsewhere():
    seen = []

    def work():
        seen.append(active())
        with ar.map_logical_axis_names(B):
            seen.append(active())
        ar.set_logical_axis_rules(C)

    with ar.map_logical_axis_names(A):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert active() == rules(A)
    assert seen == [[], rules(B)]


def test_an_object_made_in_one_thread_prepends_when_entered_in_another():
    scope, seen = ar.map_logical_axis_names(A), []

    def work():
        with scope:
            seen.append(active())
        seen.append(active())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [rules(A), []]
    assert active() == rules(A)
    ar.set_logical_axis_rules(())


def test_many_threads_do_not_see_each_other():
    wrong = []

    def work(number):
        mine = {f"n{number}": f"m{number}"}
        for _ in range(200):
            with ar.map_logical_axis_names(mine):
                if tuple(ar.logical_to_mesh_axes((f"n{number}",))) != (f"m{number}",) or active() != rules(
                    mine
                ):
                    wrong.append(number)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(50)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


# Generators and coroutines.


def test_a_decorated_generator_has_the_rules_only_while_its_own_code_runs():
    @ar.map_logical_axis_names(A)
    def steps():
        got = yield active()
        with ar.map_logical_axis_names(B):
            inner = active()
        try:
            yield got, inner
        except KeyError:
            yield active()
        return active()

    running = steps()
    assert active() == []
    assert next(running) == rules(A)
    assert active() == []
    with ar.map_logical_axis_names(C):
        assert running.send("x") == ("x", rules(B, A, C))
    assert running.throw(KeyError) == rules(A)
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == rules(A)
    assert active() == []


def test_decorated_generators_interleave_and_close():
    closed = []

    @ar.map_logical_axis_names(A)
    def one():
        try:
            while True:
                yield active()
        finally:
            closed.append(active())

    @ar.map_logical_axis_names(B)
    def two():
        while True:
            yield active()

    first, second = one(), two()
    assert [next(first), next(second), next(first), next(second)] == [rules(A), rules(B)] * 2
    first.close()
    assert closed == [rules(A)]
    assert active() == []


def test_decorated_coroutines_do_not_see_each_others_rules():
    seen = {"a": [], "b": []}

    def task(name):
        async def work():
            for _ in range(5):
                seen[name].append(active())
                await asyncio.sleep(0)
            return name

        return work

    async def main():
        one = ar.map_logical_axis_names(A)(task("a"))
        two = ar.map_logical_axis_names(B)(task("b"))
        assert active() == []
        return await asyncio.gather(one(), two())

    assert asyncio.run(main()) == ["a", "b"]
    assert seen == {"a": [rules(A)] * 5, "b": [rules(B)] * 5}
    assert active() == []


def test_the_limit_blocks_of_tasks_share_their_thread():
    """JAX keeps its contexts per thread: blocks of two tasks that overlap are seen, and refused."""
    seen, errors = [], []

    async def hold(mapping, release):
        try:
            with ar.map_logical_axis_names(mapping):
                await release.wait()
        except ar.ScopeError as error:
            errors.append(error)

    async def main():
        first, second = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(hold(A, first)), asyncio.create_task(hold(B, second))]
        await asyncio.sleep(0)
        seen.append(active())
        first.set()
        await tasks[0]
        second.set()
        await tasks[1]

    asyncio.run(main())
    assert seen == [rules(B, A)]
    assert len(errors) == 1
    assert active() == []


def test_an_asynchronous_generator_cannot_be_decorated():
    async def steps():
        yield 1

    scope = ar.map_logical_axis_names(A)
    with pytest.raises(ar.ScopeError, match="asynchronous generator"):
        scope(steps)
    assert active() == []


# Traces.


def laid_out(x):
    return ar.constrain(x, "batch embed", unmapped="replicate")


def test_a_jitted_function_is_traced_again_under_other_rules_and_not_under_the_first_again(mesh):
    traced = []

    @jax.jit
    def function(x):
        traced.append(active())
        return laid_out(x * 2)

    x = np.ones((8, 8), np.float32)
    one, two = {"batch": "data"}, {"batch": "model", "embed": "data"}
    with jax.set_mesh(mesh):
        for wanted, spec in [(one, P("data", None)), (two, P("model", "data")), (one, P("data", None))]:
            with ar.map_logical_axis_names(wanted):
                result = function(x)
            assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert traced == [rules(one), rules(two)]


def test_equal_rules_share_a_trace():
    traced = []

    @jax.jit
    def function(x):
        traced.append(active())
        return x

    for _ in range(3):
        with ar.map_logical_axis_names(dict(A)):
            function(1.0)
    assert traced == [rules(A)]


def test_a_block_inside_a_trace_works(mesh):

    @jax.jit
    def function(x):
        with ar.map_logical_axis_names({"batch": "data"}):
            y = laid_out(x)
        assert active() == []
        return y

    with jax.set_mesh(mesh):
        assert function(np.ones((8, 8))).sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def test_a_nested_jit_inside_a_block_inside_a_trace_sees_the_rules():
    traced = []

    @jax.jit
    def inner(x):
        traced.append(active())
        return x

    @jax.jit
    def outer(x):
        inner(x)
        with ar.map_logical_axis_names(A):
            return inner(x)

    outer(jnp.ones(2))
    assert traced == [[], rules(A)]


def test_a_bare_call_inside_a_trace_is_an_error():
    @jax.jit
    def function(x):
        ar.map_logical_axis_names(A)
        return x

    with pytest.raises(ar.ScopeError, match="inside a trace without `with`"):
        function(1.0)
    assert active() == []


def test_a_stored_call_inside_a_trace_is_an_error_when_the_rules_are_needed():
    @jax.jit
    def function(x):
        kept = ar.map_logical_axis_names(A)
        assert kept
        return ar.logical_to_mesh_axes("a") and x

    @jax.jit
    def entered(x):
        kept = ar.map_logical_axis_names(A)
        with kept:
            assert active() == rules(A)
        return x

    with pytest.raises(ar.ScopeError, match="inside a trace without `with`"):
        function(1.0)
    entered(1.0)
    assert active() == []


def test_a_call_through_a_helper_inside_a_trace_is_an_error_when_the_rules_are_needed():
    def activate():
        return ar.map_logical_axis_names(A)

    @jax.jit
    def function(x):
        activate()
        return ar.logical_to_mesh_axes("a") and x

    with pytest.raises(ar.ScopeError, match="inside a trace without `with`"):
        function(1.0)

    @jax.jit
    def innocent(x):
        return ar.logical_to_mesh_axes("a") and x

    kept = []
    jax.jit(lambda x: kept.append(ar.map_logical_axis_names(A)) or x)(1.0)
    with contextlib.suppress(TypeError):  # a spec is no value of a trace
        innocent(1.0)
    assert active() == []


def test_two_scopes_may_be_made_before_they_are_entered_inside_a_trace():
    @jax.jit
    def function(x):
        one, two = ar.map_logical_axis_names(A), ar.map_logical_axis_names(B)
        with one, two:
            assert active() == rules(B, A)
        return x

    function(1.0)
    assert active() == []


def test_a_function_may_be_decorated_inside_a_trace():
    @jax.jit
    def function(x):
        @ar.map_logical_axis_names(A)
        def inner(x):
            assert active() == rules(A)
            return x

        return inner(x)

    function(1.0)
    assert active() == []


def test_decorated_generators_may_yield_inside_blocks_of_their_own():
    @ar.map_logical_axis_names(A)
    def steps():
        with ar.map_logical_axis_names(B):
            yield active()
            yield active()
        yield active()

    running = steps()
    assert next(running) == rules(B, A)
    assert active() == []
    with ar.map_logical_axis_names(C):
        assert next(running) == rules(B, A, C)
    assert next(running) == rules(A)
    assert active() == []


def test_a_scope_of_a_thread_that_has_ended_prepends_when_entered_elsewhere():
    made, seen = [], []

    def in_a_thread(work):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()

    def use():
        with made[0]:
            seen.append(active())

    in_a_thread(lambda: made.append(ar.map_logical_axis_names(A)))
    in_a_thread(use)
    assert seen == [rules(A)]


def test_setting_rules_inside_a_trace_is_an_error():
    with pytest.raises(ar.ScopeError, match="inside a trace"):
        jax.jit(lambda x: ar.set_logical_axis_rules(A) or x)(1.0)
    assert active() == []


def test_vmap_and_grad_keep_the_rules():
    with ar.map_logical_axis_names(A):
        assert jax.vmap(lambda x: (active() == rules(A)) * x)(jnp.ones(3)).all()
        assert jax.grad(lambda x: (active() == rules(A)) * x)(1.0) == 1.0
