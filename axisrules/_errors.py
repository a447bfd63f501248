"""Every kind of error, and the one table of reasons.

Owns the error classes and the table that maps a reason code to its error class. Their base and the
text layout that all of them share stand in ``_messages.py``.
"""

from __future__ import annotations

from axisrules._messages import AxisRulesError as AxisRulesError
from axisrules._messages import PlanError as PlanError
from axisrules._messages import gather as gather
from axisrules._messages import raise_all as raise_all


class RulesError(AxisRulesError):
    """A rule is malformed, or a rules file is."""

    reason = "bad_rule"


class NameTableError(AxisRulesError):
    """An entry of a name table is malformed, or its file is."""

    reason = "bad_table"


class NamesError(AxisRulesError):
    """The axis names of an array are malformed."""

    reason = "bad_names"


class RepeatedNameError(NamesError):
    """One array bears a logical name twice."""

    reason = "repeated_name"


class RankError(NamesError):
    """An array has another number of dimensions than it has names."""

    reason = "rank_mismatch"


class MissingNamesError(NamesError):
    """An array has no entry among the names."""

    reason = "names_missing"


class ExtraNamesError(NamesError):
    """Names are given for an array that the tree does not have."""

    reason = "extra_names"


class UnconstrainedError(NamesError):
    """An unconstrained dimension was asked for where a layout is needed."""

    reason = "unconstrained_not_placeable"


class UnknownNameError(AxisRulesError):
    """No rule mentions a name (``unmapped="error"``)."""

    reason = "unknown_name"


class AxisTakenError(AxisRulesError):
    """Two dimensions of one array want one mesh axis (``taken="error"``)."""

    reason = "axis_taken"


class DivisibilityError(AxisRulesError):
    """A dimension does not divide over its mesh axes (``indivisible="error"``)."""

    reason = "indivisible"


class AbsentAxisError(AxisRulesError):
    """A rule or a spec names an axis that the mesh lacks (``absent="error"``)."""

    reason = "absent_axis"


class SpecError(AxisRulesError):
    """A PartitionSpec that was given as the layout itself does not fit mesh and shape."""

    reason = "bad_spec"


class MeshError(AxisRulesError):
    """A mesh, or its text, is malformed or does not fit the devices."""

    reason = "bad_mesh"


class NoMeshError(AxisRulesError):
    """A mesh is needed, and none was given or is active."""

    reason = "no_mesh"


class NoRulesError(AxisRulesError):
    """Rules are needed, and none were given or are active."""

    reason = "no_rules"


class LeafError(AxisRulesError):
    """A leaf cannot be held by JAX as it is (its dtype, its kind)."""

    reason = "bad_leaf"


class TiedError(AxisRulesError):
    """One array stands at two paths with different names."""

    reason = "tied_apart"


class LayoutError(AxisRulesError):
    """A plan breaks a limit of ``plan.check``."""

    reason = "limit"


class ScopeError(AxisRulesError):
    """The scope of active rules was left out of order, or changed inside a trace."""

    reason = "scope"


class ConstraintError(AxisRulesError):
    """A constraint that JAX cannot express."""

    reason = "constraint"


class PolicyError(AxisRulesError):
    """An option has a value that it cannot have."""

    reason = "bad_policy"


class InitError(AxisRulesError):
    """What makes a tree has effects, or uses up a generator that it captures."""

    reason = "init"


class StateError(AxisRulesError):
    """An array of an optimizer state belongs to no parameter."""

    reason = "bad_state"


class BatchError(AxisRulesError):
    """A batch does not divide over the devices, or its leaves do not fit together."""

    reason = "bad_batch"


class CheckpointError(AxisRulesError):
    """A checkpoint is malformed, or it lacks what was asked for."""

    reason = "bad_checkpoint"


class CatalogError(AxisRulesError):
    """The catalog has no such table."""

    reason = "no_table"


class ProcessError(AxisRulesError):
    """The processes of one program disagree."""

    reason = "processes_differ"


class HardwareError(AxisRulesError):
    """A piece of hardware is unknown, or its file is malformed."""

    reason = "bad_hardware"


class MissingExtraError(AxisRulesError, ImportError):  # type: ignore[misc]
    """A package that an extra brings is not installed."""

    reason = "missing_extra"


class UnmappedAxisWarning(UserWarning):
    """Names that no rule mentions keep their dimensions whole (``unmapped="warn"``)."""


# Every reason that a resolution or a report can give: what it says of a dimension (or of a
# leaf), and the error that the same fact becomes under a strict policy.
REASONS: dict[str, tuple[str, type[AxisRulesError] | None]] = {
    "split": ("split over {axes} by rule {rule}", None),
    "size_one_axis": ("whole: {axes} by rule {rule} has size 1 and splits nothing", None),
    "whole_by_rule": ("whole by rule {rule}", None),
    "unnamed": ("whole: it has no name", None),
    "unknown_name": ("whole: no rule names it", UnknownNameError),
    "axis_taken": ("dimension {holder} holds {axis}", AxisTakenError),
    "partly_taken": ("dimension {holder} holds {axis}", None),
    "indivisible": ("size {size} does not divide over {axes}", DivisibilityError),
    "partly_divisible": ("size {size} divides over {axes} only", None),
    "size_one_dim": ("a dimension of size 1 cannot be split", None),
    "absent_axis": ("the mesh has no axis {axis}", AbsentAxisError),
    "nothing_left": ("its axes of size 1 stand in the spec already", None),
    "splits_group": ("{axes} would split a group of elements that belong together", DivisibilityError),
    "filled": ("split over {axes} by fill", None),
    "explicit_spec": ("laid out by the given PartitionSpec", SpecError),
    "whole_on_purpose": ("whole: the leaf's names are None", None),
    "unconstrained": ("left to the compiler", UnconstrainedError),
    "names_missing": ("whole: the leaf has no names", MissingNamesError),
    "pattern_overlap": ("a later pattern matches this leaf too", None),
    "unused_pattern": ("no leaf matches this pattern", None),
    "cuts_fused": ("split across the parts that are fused in it", None),
    "splits_heads": ("split across its fused parts, unless every device gets whole heads", None),
    "unused_rule": ("no dimension bears this name", None),
}

for _name, _class in list(globals().items()):
    if isinstance(_class, type) and issubclass(_class, (AxisRulesError, UnmappedAxisWarning)):
        _class.__module__ = "axisrules"  # where users import them from, and what tracebacks show
