"""The calls that load a checkpoint, and the one that only looks at its headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import jax

from axisrules._errors import CheckpointError
from axisrules.checkpoints._folders import PathLike, open_safetensors
from axisrules.checkpoints._loading import LoadOptions, load, structs
from axisrules.checkpoints._npz import open_npz
from axisrules.checkpoints._orbax import is_orbax, open_orbax
from axisrules.checkpoints._progress import Progress
from axisrules.checkpoints._select import SelectOptions, select


def load_safetensors(
    path: PathLike,
    names: Any = None,
    *,
    progress: Progress = None,
    check: bool = True,
    **options: Unpack[LoadOptions],
) -> dict[str, jax.Array]:
    """Loads a safetensors checkpoint, each shard straight from its bytes in the file.

    Plans first, so that an array that does not fit is an error before a byte is read. Every process
    reads only the slices that its devices hold, one shard at a time. The result never shares memory
    with a file.

    All patterns are those of ``NameTable``. All of them, and ``names``, speak of paths and dimensions
    as the file has them; names then move along with the dimensions. Only ``rename`` comes last.

    Args:
        path: A file, a folder, or the index (``*.safetensors.index.json``) of several files.
        names: Names in any form that ``plan`` takes, for the arrays as the file has them; or what
            ``catalog.load`` takes, such as ``"llama"``.
        progress: Whether to show a bar (needs rich); a function gets the bytes so far and all bytes.
            ``None`` shows one for long loads on a terminal, where rich is installed.
        check: On several processes, whether they first make sure that they do the same.
        **options: The options of ``plan``: ``mesh``, ``rules``, the policies, ``unnamed``, ``fill``,
            ``min_bytes``, ``memory_kind``, and ``dtype``, to which floating-point arrays are cast on
            the way. And what is taken:

            * ``keep``, ``skip``: Patterns of the arrays to load, and of those to leave out.
            * ``prefix``: Load what is below this prefix, and take it off the paths.
            * ``transpose``: Patterns of matrices to transpose; or a mapping of patterns to the
              dimensions in their new order.
            * ``stack``: Patterns like ``"model.layers.*"``, whose numbered members become one array
              with a leading dimension named ``layers``; or a mapping of patterns to that name.
            * ``rename``: A mapping of patterns to new paths, in which a wildcard stands for what it
              matched; or a function of the path.

    Returns:
        The placed arrays by path, flat.

    Raises:
        CheckpointError: A file is malformed, lacks something, or was changed while it was read.
        ProcessError: Another process failed, or would do something else.
        AxisRulesError: Something does not fit; every failure is in the one error, and nothing was
            placed.

    Example:
        >>> import axisrules as ar, numpy as np, tempfile
        >>> from safetensors.numpy import save_file
        >>> file = f"{tempfile.mkdtemp()}/model.safetensors"
        >>> save_file({f"layers.{i}.up": np.ones((32, 8), np.float32) for i in range(4)}, file)
        >>> params = ar.checkpoints.load_safetensors(
        ...     file, ar.NameTable({"layers.*.up": "mlp embed"}), mesh=ar.make_mesh("data=4,model=2"),
        ...     rules={"embed": "data", "mlp": "model", "layers": None},
        ...     transpose="layers.*.up", stack="layers.*")
        >>> params["layers.up"].shape, tuple(params["layers.up"].sharding.spec)
        ((4, 8, 32), (None, 'data', 'model'))
    """
    return load(lambda: open_safetensors(path), names, options, progress, check)


def load_npz(
    path: PathLike,
    names: Any = None,
    *,
    progress: Progress = None,
    check: bool = True,
    **options: Unpack[LoadOptions],
) -> dict[str, jax.Array]:
    """Loads the arrays of an ``.npz`` file, as ``load_safetensors`` loads those of its files.

    Arrays that ``numpy.savez`` wrote are read slice by slice; those of ``numpy.savez_compressed`` have
    to be taken out of the file whole, one at a time. Objects are never unpickled.

    Args:
        path: The file.
        names: As in ``load_safetensors``.
        progress: As in ``load_safetensors``.
        check: As in ``load_safetensors``.
        **options: As in ``load_safetensors``.

    Returns:
        The placed arrays by path, flat.

    Raises:
        CheckpointError: The file is malformed, lacks something, or was changed while it was read.
        ProcessError: Another process failed, or would do something else.
        AxisRulesError: Something does not fit; every failure is in the one error, and nothing was
            placed.

    Example:
        >>> import axisrules as ar, numpy as np, tempfile
        >>> file = f"{tempfile.mkdtemp()}/params.npz"
        >>> np.savez(file, **{"up/kernel": np.ones((8, 32), np.float32)})
        >>> params = ar.checkpoints.load_npz(file, {"up/kernel": "embed mlp"},
        ...     mesh=ar.make_mesh("data=4,model=2"), rules={"embed": "data", "mlp": "model"})
        >>> params["up/kernel"].addressable_shards[0].data.shape
        (2, 16)
    """
    return load(lambda: open_npz(path), names, options, progress, check)


def open(path: PathLike, **options: Unpack[SelectOptions]) -> Any:  # noqa: A001  read as checkpoints.open
    """What a checkpoint holds; reads headers and no array.

    Args:
        path: A safetensors file, folder or index, an ``.npz`` file, or an Orbax checkpoint.
        **options: What is taken, as in ``load_safetensors``; not for Orbax checkpoints.

    Returns:
        ``ShapeDtypeStruct``s for ``plan``: by path, flat; of an Orbax checkpoint in the tree that was
        saved.

    Raises:
        CheckpointError: It is no such checkpoint, is malformed, or does not fit the options.

    Example:
        >>> import axisrules as ar, numpy as np, tempfile
        >>> from safetensors.numpy import save_file
        >>> file = f"{tempfile.mkdtemp()}/model.safetensors"
        >>> save_file({"up": np.ones((8, 32), np.float32)}, file)
        >>> tree = ar.checkpoints.open(file)
        >>> tree["up"].shape, tree["up"].dtype
        ((8, 32), dtype('float32'))
        >>> ar.plan(tree, {"up": "embed mlp"}, mesh="data=4096,model=2", indivisible="next",
        ...         rules={"embed": "data", "mlp": "model"}).bytes_per_device
        512
    """
    found = Path(path)
    if is_orbax(found):
        if options:
            raise CheckpointError(
                f"an Orbax checkpoint takes no {next(iter(options))}=",
                fix="leave it out; restore_orbax has target=.",
            )
        return open_orbax(found)
    if found.suffix == ".npz":
        return structs(select(open_npz(found), **options))
    return structs(select(open_safetensors(found), **options))
