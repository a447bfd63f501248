"""Checkpoint files for tests, written without any package."""

import json
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np

WORDS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32",
    "float64": "F64", "complex64": "C64", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip


def dtype(name):
    return np.dtype(getattr(jnp, "bool_" if name == "bool" else name))


def write(path, arrays):
    """A safetensors file."""
    header, pieces, end = {}, [], 0
    for name, array in arrays.items():
        pieces.append(np.ascontiguousarray(array).tobytes())
        header[name] = entry(WORDS[array.dtype.name], array.shape, end, end := end + array.nbytes)
    return write_raw(path, header, b"".join(pieces))


def entry(word, shape, begin, end):
    return {"dtype": word, "shape": list(shape), "data_offsets": [begin, end]}


def write_raw(path, header, data=b"", length=None):
    """A file with a header that may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    Path(path).write_bytes(struct.pack("<Q", size) + text + data)
    return str(path)


def write_sharded(folder, arrays, count=2):
    """A folder of files and the index that lists them."""
    folder.mkdir(exist_ok=True)
    files = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    where = {name: files[number % count] for number, name in enumerate(arrays)}
    for file in files:
        write(folder / file, {name: array for name, array in arrays.items() if where[name] == file})
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def bits(array):
    """What an array holds, to the bit."""
    host = np.asarray(array)
    return host.dtype.name, host.shape, host.tobytes()
