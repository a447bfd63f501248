"""Existing checkpoints: streamed onto their shards, named by tables, on one process or many.

``load_safetensors`` and ``load_npz`` read, of every array, the slices that this process's devices
hold; ``open`` reads headers alone, so that a checkpoint of any size can be planned at once;
``restore_orbax`` hands an Orbax checkpoint its new layout. This file re-exports; it holds no logic.
"""

from axisrules.checkpoints._api import load_npz as load_npz
from axisrules.checkpoints._api import load_safetensors as load_safetensors
from axisrules.checkpoints._api import open as open  # noqa: A004  read as checkpoints.open
from axisrules.checkpoints._orbax import restore_orbax as restore_orbax
