"""Named rule sets: functions from mesh axis names to ``Rules``.

Owns one table that says in which order the words of common models get mesh axes, and the presets
that fill it in; also ``MeshRules``, a rule set of four words. Decides nothing about an array: that
is the engine's work.

The words are those of T5X, MaxText and MaxDiffusion models, those of plain checkpoint tables (a word
that an array has twice is ``_out`` the second time), and the usual ones of activations. Every preset
mentions all of them, with ``None`` for those that stay whole on purpose, so ``unmapped="error"``
finds the words that it does not know. Those that split weights over ``data`` have fallbacks for a
dimension that does not divide, such as an odd vocabulary: plan with ``indivisible="next"`` to use them.

Every argument is a mesh axis, a tuple of them (major to minor), or ``None`` for none; anything else
is a ``RulesError``.

Call the width of an activation ``activation_embed``, whole in every preset. ``embed`` is the weights'
word: beside a batch that cannot be split it would take the axis that the batch left.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain

from jax.sharding import PartitionSpec

from axisrules._errors import UnknownNameError, raise_all
from axisrules._rules import MeshAxes, Rules, as_rules
from axisrules._single import logical_to_mesh_axes
from axisrules._text import did_you_mean, nearest

_EXPERTS = "exp experts"
_WIDTH = "embed embed_attn embed_moe embed_vocab embed_out"
_INNER = "mlp mlp_moe mlp_out heads q_heads kv_heads joined_kv qkv heads_out vocab conv_out out_channels"
_REST = "hidden conv_in in_channels channels lora_rank lora_rank_out groups groups_out"

# Words and the roles of mesh axes that they get, first come, first served. `+` appends the axes of
# another role where a preset fills it; a line counts where the preset fills its first role. A word
# that no line gives an axis is whole.
_TABLE = (
    (f"{_EXPERTS} activation_exp", "expert"),
    ("batch activation_batch", "batch+expert"),
    ("batch activation_batch", "batch"),  # where an expert dimension holds the expert axes
    (f"{_INNER} groups", "inner"),
    ("activation_heads activation_kv_heads activation_mlp activation_vocab", "inner"),
    ("length sequence activation_length activation_norm_length", "sequence"),  # what `inner` left
    ("embed_attn", "width+expert+inner"),  # beside KV heads that are fewer than the axis is wide
    (f"{_WIDTH} {_INNER} {_REST} {_EXPERTS}", "width+expert"),
    (f"{_WIDTH} {_INNER} {_REST} {_EXPERTS}", "width"),
    # Split `layers` would be gathered in every step of a scan; split `kv` makes every score a sum.
    ("layers norm kv kv_head_dim classes position relpos_buckets num_mel", ""),
    ("keep_1 keep_2 conv_h conv_w activation_embed activation_kv", ""),
)


def _rules(axes: dict[str, MeshAxes], **roles: str) -> Rules:
    """The rules of the table where every role, given as a key of ``axes``, has those mesh axes."""
    given = dict(Rules(axes).pairs)
    filled = {role: given[key] for role, key in roles.items()}

    def joined(needed: str) -> tuple[str, ...]:
        parts = [filled.get(role, ()) for role in needed.split("+")]
        return tuple(dict.fromkeys(chain(*parts))) if parts[0] else ()

    wanted = [(word, joined(needed)) for words, needed in _TABLE for word in words.split()]
    split = {word for word, mesh_axes in wanted if mesh_axes}
    return as_rules(tuple(dict.fromkeys(rule for rule in wanted if rule[1] or rule[0] not in split)))


def data_parallel(data: MeshAxes = "data") -> Rules:
    """Data parallelism: the batch is split, every device holds all weights.

    The forward pass moves nothing. The gradients of all weights are summed over the data axes: an
    all-reduce, once per step.

    Args:
        data: The mesh axes over which the batch is split.

    Example:
        >>> import axisrules as ar
        >>> rules = ar.presets.data_parallel(("replica", "data"))
        >>> tuple(ar.logical_to_mesh_axes("batch length embed", rules))
        (('replica', 'data'), None, None)
        >>> tuple(ar.logical_to_mesh_axes("embed mlp", rules))
        (None, None)
    """
    return _rules({"data": data}, batch="data")


def fsdp(data: MeshAxes = "data") -> Rules:
    """Fully sharded data parallelism (ZeRO-3): batch and weights are split over the same axes.

    A weight is split along its width ``embed``; where that does not divide, or is not there, along
    another large dimension. Before a layer uses a weight it is all-gathered, in the forward and again
    in the backward pass unless it was kept; its gradient is reduce-scattered. Norm scales stay whole.

    Args:
        data: The mesh axes over which batch and weights are split; as a rule all of them.

    Example:
        >>> import axisrules as ar
        >>> rules = ar.presets.fsdp()
        >>> tuple(ar.logical_to_mesh_axes("embed mlp", rules))
        ('data', None)
        >>> gpt2 = ar.resolve("vocab embed", (50257, 768), mesh="data=8", rules=rules, indivisible="next")
        >>> tuple(gpt2.spec)
        (None, 'data')
    """
    return _rules({"data": data}, batch="data", width="data")


def tensor_parallel(model: MeshAxes = "model", *, data: MeshAxes = "data") -> Rules:
    """Tensor parallelism as in Megatron-LM: heads, hidden units and the vocabulary are split.

    The first matmul of a block is split by columns and its last one by rows, so that a block moves its
    activations once: an all-reduce over the model axes after the attention's output projection and one
    after the MLP's, and the same on the way back. The lookup in the split vocabulary ends in an
    all-reduce too. Convolutions are split by output channels, which are gathered for the next one.
    What is left, norms and biases of the width among it, is whole. Beside it the batch is split over
    the data axes, over which gradients are all-reduced.

    Keep the model axes within the fastest links. Where an array joins heads and their size in one
    dimension (``joined_kv``, ``qkv``), sizes cannot tell whether an axis cuts a head in two.

    Args:
        model: The mesh axes over which a layer is split.
        data: The mesh axes over which the batch is split; ``None`` where the mesh has none.

    Example:
        >>> import axisrules as ar
        >>> rules = ar.presets.tensor_parallel("tp")
        >>> tuple(ar.logical_to_mesh_axes("embed mlp", rules))
        (None, 'tp')
        >>> tuple(ar.logical_to_mesh_axes("mlp embed", rules))
        ('tp', None)
    """
    return _rules({"data": data, "model": model}, batch="data", inner="model")


def fsdp_tensor_parallel(data: MeshAxes = "data", model: MeshAxes = "model") -> Rules:
    """Both at once: each layer is split over the model axes, and what is left over the data axes.

    Per layer, weights are all-gathered over the data axes alone, and arrive as the shards of tensor
    parallelism; their gradients are reduce-scattered over the same axes. Activations are all-reduced
    over the model axes as in ``tensor_parallel``. Projections to fewer KV heads than the model axes
    are wide are split over all axes along their width, and gathered whole.

    Args:
        data: The mesh axes over which the batch and the width of the weights are split.
        model: The mesh axes over which a layer is split.

    Example:
        >>> import axisrules as ar
        >>> rules = ar.presets.fsdp_tensor_parallel()
        >>> tuple(ar.logical_to_mesh_axes("embed mlp", rules))
        ('data', 'model')
        >>> key = ar.resolve("embed_attn kv_heads kv_head_dim", (4096, 8, 128),
        ...                  mesh="data=4,model=16", rules=rules, indivisible="next")
        >>> tuple(key.spec)
        (('data', 'model'), None, None)
    """
    return _rules({"data": data, "model": model}, batch="data", width="data", inner="model")


def sequence_parallel(data: MeshAxes = "data", model: MeshAxes = "model") -> Rules:
    """Tensor parallelism whose activations are split along the sequence between the blocks.

    Weights lie as in ``tensor_parallel``, but a table of positions along its length. An activation
    with heads, hidden units or a vocabulary is split along those, any other one along its sequence
    over the same axes, so norms and residuals are computed, and kept for the backward pass, once. An
    all-gather over the model axes opens a block and a reduce-scatter closes it, in place of the
    all-reduce and for the same bytes.

    The layout of activations is what ``constrain`` is told: name them at the borders of the blocks.

    Args:
        data: The mesh axes over which the batch is split; ``None`` where the mesh has none.
        model: The mesh axes over which a layer, and between layers the sequence, is split.

    Example:
        >>> import axisrules as ar
        >>> rules = ar.presets.sequence_parallel()
        >>> tuple(ar.logical_to_mesh_axes("batch length activation_embed", rules))
        ('data', 'model', None)
        >>> tuple(ar.logical_to_mesh_axes("batch length activation_mlp", rules))
        ('data', None, 'model')
    """
    return _rules({"data": data, "model": model}, batch="data", inner="model", sequence="model")


def expert_parallel(data: MeshAxes = "data", model: MeshAxes = "model", expert: MeshAxes = "expert") -> Rules:
    """Experts are split over axes of their own, all else as in ``fsdp_tensor_parallel``.

    Every device of the expert axes holds some of the experts, and outside of them its part of the
    batch: an all-to-all takes tokens to their experts, and another brings them back. Inside an expert
    the model axes split the hidden units and the data axes the width. Every other weight is
    split over data and expert axes together, and gathered over both. ``expert="data"`` puts
    experts on the data axes; ``model=None`` leaves out tensor parallelism.

    A checkpoint that keeps every expert in an array of its own has no dimension to split over the
    expert axes; such arrays lie as any other weight.

    Args:
        data: The mesh axes over which the batch and the width of the weights are split.
        model: The mesh axes over which a layer, and every expert, is split.
        expert: The mesh axes over which the experts are split, and the batch outside of them.

    Example:
        >>> import axisrules as ar
        >>> rules = ar.presets.expert_parallel()
        >>> tuple(ar.logical_to_mesh_axes("exp embed_moe mlp_moe", rules))
        ('expert', 'data', 'model')
        >>> tuple(ar.logical_to_mesh_axes("embed mlp", rules))
        (('data', 'expert'), 'model')
        >>> tuple(ar.logical_to_mesh_axes("activation_exp batch activation_embed", rules))
        ('expert', 'data', None)
    """
    axes = {"data": data, "model": model, "expert": expert}
    return _rules(axes, batch="data", width="data", inner="model", expert="expert")


@dataclass(frozen=True, kw_only=True)
class MeshRules:
    """Mesh axes for four names: a fixed and small set of rules.

    The order of the fields is the order of the rules. ``Rules`` takes any names.

    Attributes:
        data: Mesh axes of the batch; ``None``, as everywhere here, leaves the dimension whole.
        embed: Mesh axes of the width.
        mlp: Mesh axes of the hidden units.
        heads: Mesh axes of the attention heads.

    Example:
        >>> import axisrules as ar
        >>> ar.presets.MeshRules(data="data", mlp="model").to_rules()
        Rules([('data', 'data'), ('embed', None), ('mlp', 'model'), ('heads', None)])
    """

    data: MeshAxes = None
    embed: MeshAxes = None
    mlp: MeshAxes = None
    heads: MeshAxes = None

    def __post_init__(self) -> None:
        self.to_rules()

    def to_rules(self) -> Rules:
        """The same as ``Rules``, for everything that takes rules."""
        return as_rules(tuple((field.name, getattr(self, field.name)) for field in fields(self)))


def data_parallel_rules(data_axis: MeshAxes = "data") -> MeshRules:
    """``MeshRules`` for data parallelism: only the batch is split."""
    return MeshRules(data=data_axis)


def fsdp_rules(data_axis: MeshAxes = "data", model_axis: MeshAxes = "model") -> MeshRules:
    """``MeshRules`` with the batch over one axis and every weight over the other."""
    return MeshRules(data=data_axis, embed=model_axis, mlp=model_axis, heads=model_axis)


def partition_spec_for_names(rules: MeshRules, *logical_names: str | None) -> PartitionSpec:
    """The partition spec of an array whose dimensions bear the names.

    Of two names that want one mesh axis the first in the order data, embed, mlp, heads gets it.

    Args:
        rules: The mesh axes of the names.
        *logical_names: One of the four names, or ``None``, per dimension.

    Raises:
        UnknownNameError: A name is none of the four.
        NamesError: An entry is neither a name nor ``None``, or a name stands twice.

    Example:
        >>> from axisrules.presets import fsdp_rules, partition_spec_for_names
        >>> tuple(partition_spec_for_names(fsdp_rules(), "data", "embed"))
        ('data', 'model')
    """
    table = rules.to_rules()
    spec = logical_to_mesh_axes(logical_names, table)
    raise_all(
        _unknown(dim, name, logical_names, table)
        for dim, name in enumerate(logical_names)
        if isinstance(name, str) and name not in table.by_name
    )
    return spec


def _unknown(dim: int, name: str, names: tuple[str | None, ...], table: Rules) -> UnknownNameError:
    return UnknownNameError(
        f"MeshRules has no {name!r}, the name of dimension {dim}{did_you_mean(name, table.by_name)}",
        fix=f"its names are {', '.join(table.by_name)}; write None for a dimension that stays whole, "
        "or use axisrules.Rules, which takes any name.",
        name=name,
        dim=dim,
        names=names,
        nearest=nearest(name, table.by_name),
    )
