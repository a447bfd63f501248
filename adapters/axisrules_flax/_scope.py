"""``rules_from_flax``: the rules of Flax's own scope.

Owns reading them. They mean what rules mean in axisrules, where the first available one wins.
"""

from __future__ import annotations

from flax.core.spmd import get_logical_axis_rules

from axisrules import Rules


def rules_from_flax() -> Rules:
    """The rules of Flax that are active in this thread; none are no rules.

    Linen and NNX share one scope: ``flax.linen.logical_axis_rules``, ``flax.nnx.logical_axis_rules``
    and ``flax.linen.set_logical_axis_rules`` all write the rules that are read here. The rules of
    axisrules are left alone: pass the result as ``rules=``, or make it active.

    Flax reads its rules in two ways. They are taken as Linen takes them, in order and the first
    available one first; NNX has the last one of a name win.

    Returns:
        The rules in their order.

    Raises:
        RulesError: Flax accepted rules that are malformed.

    Example:
        >>> import axisrules_flax, flax.linen
        >>> with flax.linen.logical_axis_rules((("embed", "data"), ("mlp", "model"))):
        ...     axisrules_flax.rules_from_flax()
        Rules([('embed', 'data'), ('mlp', 'model')])
    """
    return Rules(tuple(get_logical_axis_rules() or ()))
