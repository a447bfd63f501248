"""What weights and gradients put on the wires in one training step, from the plan alone.

Owns ``traffic``. The model of what moves stands in ``_flows.py``.
"""

from __future__ import annotations

from axisrules._errors import PolicyError
from axisrules._plan import Plan
from axisrules.cost._flows import of_kinds
from axisrules.cost._hardware import HardwareLike, as_hardware
from axisrules.cost._kinds import kinds
from axisrules.cost._moves import Traffic


def traffic(plan: Plan, batch: str = "batch", hardware: HardwareLike = None) -> Traffic:
    """Bytes of weights and gradients that a device sends per step and mesh axis, from the plan alone.

    Takes for granted what ``Traffic.assumes`` lists. What a plan cannot tell has a reason instead of
    a number: a split axis of stacked layers, weights that the batch axes split along a name that no
    kernel contracts, weights that the batch axes split beside a mesh axis that nothing uses, and
    whatever activations move.

    Args:
        plan: The plan of the parameters.
        batch: The logical name of the batch, as the rules have it.
        hardware: The accelerator, for lower bounds in seconds.

    Raises:
        UnknownNameError: No rule mentions the name of the batch.
        HardwareError: The hardware is unknown.
        PolicyError: ``plan`` is no plan.

    Example:
        >>> import axisrules as ar, numpy as np
        >>> from axisrules import cost
        >>> plan = ar.plan({"up": np.zeros((1024, 64), np.float32)}, {"up": "embed mlp"},
        ...                mesh="data=4,model=2", rules={"batch": "data", "embed": None, "mlp": "model"})
        >>> cost.traffic(plan).wire_bytes_per_axis
        {'data': 196608}
    """
    if not isinstance(plan, Plan):
        raise PolicyError(f"a {type(plan).__qualname__} is no plan", fix="pass what axisrules.plan returns.")
    chip = as_hardware(hardware)
    return of_kinds(kinds(plan.distinct), plan.rules, dict(plan.mesh.shape_tuple), batch, chip)
