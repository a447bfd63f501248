"""axisrules: names + rules + mesh -> a plan -> actions.

Name each array dimension once, say in a rule set where each name goes, and lay out the parameters
of any framework over thousands of devices. This file re-exports, some of it when it is first used; it
holds no other logic.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from axisrules import presets as presets
from axisrules._constrain import constrain as constrain
from axisrules._errors import AbsentAxisError as AbsentAxisError
from axisrules._errors import AxisRulesError as AxisRulesError
from axisrules._errors import AxisTakenError as AxisTakenError
from axisrules._errors import BatchError as BatchError
from axisrules._errors import CatalogError as CatalogError
from axisrules._errors import CheckpointError as CheckpointError
from axisrules._errors import ConstraintError as ConstraintError
from axisrules._errors import DivisibilityError as DivisibilityError
from axisrules._errors import ExtraNamesError as ExtraNamesError
from axisrules._errors import HardwareError as HardwareError
from axisrules._errors import InitError as InitError
from axisrules._errors import LayoutError as LayoutError
from axisrules._errors import LeafError as LeafError
from axisrules._errors import MeshError as MeshError
from axisrules._errors import MissingExtraError as MissingExtraError
from axisrules._errors import MissingNamesError as MissingNamesError
from axisrules._errors import NamesError as NamesError
from axisrules._errors import NameTableError as NameTableError
from axisrules._errors import NoMeshError as NoMeshError
from axisrules._errors import NoRulesError as NoRulesError
from axisrules._errors import PlanError as PlanError
from axisrules._errors import PolicyError as PolicyError
from axisrules._errors import ProcessError as ProcessError
from axisrules._errors import RankError as RankError
from axisrules._errors import RepeatedNameError as RepeatedNameError
from axisrules._errors import RulesError as RulesError
from axisrules._errors import ScopeError as ScopeError
from axisrules._errors import SpecError as SpecError
from axisrules._errors import StateError as StateError
from axisrules._errors import TiedError as TiedError
from axisrules._errors import UnconstrainedError as UnconstrainedError
from axisrules._errors import UnknownNameError as UnknownNameError
from axisrules._errors import UnmappedAxisWarning as UnmappedAxisWarning
from axisrules._initializers import with_logical_partitioning as with_logical_partitioning
from axisrules._meshes import create_named_sharding as create_named_sharding
from axisrules._meshes import make_mesh as make_mesh
from axisrules._place import shard_tree as shard_tree
from axisrules._plan import Placement as Placement
from axisrules._plan import Plan as Plan
from axisrules._plan import ReportRow as ReportRow
from axisrules._planning import plan as plan
from axisrules._resolution import Resolution as Resolution
from axisrules._rules import Rules as Rules
from axisrules._scope import get_logical_axis_rules as get_logical_axis_rules
from axisrules._scope import map_logical_axis_names as map_logical_axis_names
from axisrules._scope import set_logical_axis_rules as set_logical_axis_rules
from axisrules._shard_map import shard_map as shard_map
from axisrules._single import logical_to_mesh_axes as logical_to_mesh_axes
from axisrules._single import resolve as resolve
from axisrules._tables import NameTable as NameTable

__version__ = "0.1.0"

if _TYPE_CHECKING:
    from axisrules._batches import shard_batch as shard_batch
    from axisrules._init import init as init
    from axisrules._prefetch import Prefetch as Prefetch
    from axisrules._prefetch import prefetch as prefetch
    from axisrules._shares import ProcessShard as ProcessShard
    from axisrules._shares import process_shard as process_shard
    from axisrules._states import state_names as state_names

_NAMESPACES = frozenset({"adapters", "catalog", "checkpoints", "cost", "report", "testing"})
_LATER = {
    "Prefetch": "_prefetch",
    "ProcessShard": "_shares",
    "init": "_init",
    "prefetch": "_prefetch",
    "process_shard": "_shares",
    "shard_batch": "_batches",
    "state_names": "_states",
}


def __getattr__(name: str) -> _Any:
    """What is imported when it is first used: namespaces, and the actions that few programs begin with."""
    if name in _NAMESPACES:
        return _import_module(f"axisrules.{name}")
    if name in _LATER:
        found = globals()[name] = getattr(_import_module(f"axisrules.{_LATER[name]}"), name)
        return found
    raise AttributeError(f"module 'axisrules' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMESPACES, *_LATER})
