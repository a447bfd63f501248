"""Checkpoint files that lie, end early, or change: an error with file and array, and never a half tree."""

import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import bits, entry, write, write_raw, write_sharded

import axisrules as ar
from axisrules import checkpoints
from axisrules.checkpoints import _header

F32 = entry("F32", (2, 2), 0, 16)
RULES = {"a": "data", "b": "model"}


def refused(path, **options):
    with pytest.raises(ar.CheckpointError) as caught:
        checkpoints.open(path, **options)
    return caught.value


def raw(tmp_path, header, data=b"", length=None):
    return write_raw(tmp_path / "m.safetensors", header, data, length)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "it has 0 bytes, and the length of a header takes 8"),
        (b"1234567", "it has 7 bytes"),
        (struct.pack("<Q", 0), "its header would have 0 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "its header would have 9,223,372,036,854,775,808 bytes"),
        (struct.pack("<Q", 100) + b"{}", "is truncated: its header has 100 bytes, and the file ends after 2"),
        (struct.pack("<Q", 2) + b"[]", "its header is no table of arrays"),
        (struct.pack("<Q", 2) + b"17", "its header is no table of arrays"),
        (struct.pack("<Q", 4) + b"{\xff} ", "it is not UTF-8 at byte 1 in its header"),
        (struct.pack("<Q", 4) + b"{'a'", "it is not JSON"),
        (struct.pack("<Q", 9) + b'{"a":NaN}', "NaN is no JSON"),
        (struct.pack("<Q", 6000) + b"[" * 6000, "it is not JSON"),
        (b"PK\x03\x04" + b"\1" * 100, "its header would have"),
        (struct.pack("<Q", 33) + b'{"__metadata__":{"format":["pt"]}}'[:33], "it is not JSON"),
        (struct.pack("<Q", 34) + b'{"__metadata__":{"format":["pt"]}}', "its header is no table of arrays"),
    ],
)
def test_what_is_no_safetensors_file_is_told(tmp_path, content, what):
    file = tmp_path / "m.safetensors"
    file.write_bytes(content)
    error = refused(file)
    assert what in error.headline
    assert str(file) in error.headline
    assert error.path == str(file)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"a": 3}, "a  it is no table"),
        ({"a": {**F32, "dtype": 3}}, "a  its dtype is 3"),
        ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "a  its dtype is missing"),
        ({"a": {**F32, "shape": [2, -2]}}, "a  its shape is [2, -2]"),
        ({"a": {**F32, "shape": [2, 2.0]}}, "a  its shape is [2, 2.0]"),
        ({"a": {**F32, "shape": [True, 4]}}, "a  its shape is [true, 4]"),
        ({"a": {**F32, "shape": "22"}}, 'a  its shape is "22"'),
        ({"a": {**F32, "data_offsets": [0]}}, "a  its data_offsets are [0]"),
        ({"a": {**F32, "data_offsets": [-8, 8]}}, "a  its data_offsets are [-8, 8]"),
        ({"a": {**F32, "dtype": "F31"}}, "the dtype 'F31' does not exist; did you mean 'F32'?"),
        ({"a": {**F32, "shape": [2, 3]}}, "a  F32 [2, 3] needs 24 bytes; 0 to 16 are given"),
        ({"a": {**F32, "shape": [2**62, 2**62, 2**62]}}, "bytes; 0 to 16 are given"),
        ({"a": {**F32, "data_offsets": [16, 0]}}, "needs 16 bytes; 16 to 0 are given"),
        ({"a": {**F32, "data_offsets": [8, 24]}}, "a  ends at byte 24 of 16"),
        ({"a": F32, "b": F32}, "begins at byte 0: overlaps a, which ends at 16"),
        ({"\ud800": F32}, "its name is no text"),
        ({}, "the header  ends at byte 0, and the file has 16 bytes of arrays"),
    ],
)
def test_every_lie_of_a_header_is_told_with_its_array(tmp_path, wrong, what):
    error = refused(raw(tmp_path, wrong, bytes(16)))
    assert what in str(error)
    assert error.headline.startswith(str(tmp_path / "m.safetensors"))


def test_holes_and_bytes_beyond_the_arrays_are_told(tmp_path):
    late = {"a": entry("F32", (2,), 0, 8), "b": entry("F32", (2,), 12, 20)}
    assert "b  begins at byte 12: does not follow on a, which ends at 8" in str(
        refused(raw(tmp_path, late, bytes(20)))
    )
    assert "a  ends at byte 16, and the file has 20 bytes of arrays" in str(
        refused(raw(tmp_path, {"a": F32}, bytes(20)))
    )


def test_keys_that_stand_twice_are_told(tmp_path):
    text = json.dumps(F32).encode()
    error = refused(raw(tmp_path, b'{"a":' + text + b',"a":' + text + b"}", bytes(16)))
    assert "the key 'a' stands twice in it" in error.headline


def test_all_failures_of_all_files_are_in_one_error(tmp_path):
    arrays = {name: np.zeros((4, 4), np.float32) for name in "abcdef"}
    folder = write_sharded(tmp_path / "m", arrays, count=3)
    first, second, third = sorted(folder.glob("*.safetensors"))
    os.truncate(first, os.path.getsize(first) - 70)
    second.unlink()
    wrong = {"c": entry("F33", (4, 4), 0, 64), "f": {**entry("F32", (4, 4), 64, 128), "shape": None}}
    write_raw(third, wrong, bytes(128))
    error = refused(folder)
    assert len(error.failures) == 4
    text = str(error)
    assert f"{first}: arrays end after the end of the file; is it truncated?" in text
    assert "d  ends at byte 128 of 58" in text
    assert f"cannot read {second}: No such file or directory" in text
    assert "the dtype 'F33' does not exist" in text
    assert "f  its shape is missing" in text


def test_an_index_that_does_not_fit_its_files_is_told(tmp_path):
    folder = write_sharded(tmp_path / "m", {name: np.zeros(4, np.float32) for name in "ab"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["missing"] = "model-00001-of-00002.safetensors"
    content["weight_map"]["gone"] = "model-00003-of-00002.safetensors"
    index.write_text(json.dumps(content))
    text = str(refused(folder))
    assert "model-00001-of-00002.safetensors: lacks arrays that the index says it holds" in text
    assert "missing" in text
    assert "cannot read" in text
    assert "model-00003-of-00002.safetensors" in text
    for file in ("../a.safetensors", "/etc/passwd", ""):
        index.write_text(json.dumps({"weight_map": {"a": file}}))
        assert "names files outside of its folder" in refused(folder).headline
    for wrong in ("[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'):
        index.write_text(wrong)
        assert "has no 'weight_map'" in refused(folder).headline
    index.write_text("{")
    assert "is no index: it is not JSON" in refused(folder).headline


def test_folders_that_hold_nothing_or_too_much_are_told(tmp_path):
    assert "holds no safetensors file" in refused(tmp_path).headline
    assert "No such file" in refused(tmp_path / "gone.safetensors").headline
    write(tmp_path / "a.safetensors", {"w": np.zeros(4, np.float32)})
    write(tmp_path / "b.safetensors", {"w": np.zeros(4, np.float32)})
    assert "two files hold 'w'" in refused(tmp_path).headline
    for name in "ab":
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    assert "holds 2 indices" in refused(tmp_path).headline


@pytest.mark.parametrize("change", ["truncate", "overwrite", "append", "remove and write"])
@pytest.mark.parametrize("when", ["planned", "half placed"])
def test_a_file_that_changes_while_it_is_read_is_told(tmp_path, mesh, change, when):
    arrays = {name: np.full((64, 64), number, np.float32) for number, name in enumerate("vw")}
    file = write(tmp_path / "m.safetensors", arrays)

    def disturb():
        if change == "truncate":
            os.truncate(file, os.path.getsize(file) // 2)
        elif change == "remove and write":
            os.unlink(file)
            write(file, arrays)
        else:
            with Path(file).open("ab" if change == "append" else "r+b") as opened:
                opened.write(b"\xff" * 40000)
        os.utime(file, ns=(1, 1))  # a clock may be too coarse to tell

    def names(path, leaf):
        if when == "planned" and path == "w":
            disturb()
        return "a b"

    def progress(done, total):
        if when == "half placed" and done < total:
            disturb()

    if when == "half placed" and change == "remove and write":  # the opened file is whole
        placed = checkpoints.load_safetensors(file, names, mesh=mesh, rules=RULES, progress=progress)
        assert bits(placed["w"]) == bits(arrays["w"])
        return
    with pytest.raises(ar.CheckpointError, match=r"m\.safetensors was changed while it was read"):
        checkpoints.load_safetensors(file, names, mesh=mesh, rules=RULES, progress=progress)


def test_nothing_is_read_when_the_plan_fails(tmp_path, mesh, monkeypatch):
    file = write(tmp_path / "m.safetensors", {"w": np.zeros((6, 6), np.float32)})
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("read"))
    with pytest.raises(ar.DivisibilityError):
        checkpoints.load_safetensors(file, {"w": "a b"}, mesh=mesh, rules=RULES)
    with pytest.raises(ar.ExtraNamesError):
        checkpoints.load_safetensors(file, {"w": "_ b", "x": "a"}, mesh=mesh, rules=RULES)


def test_a_disk_that_fails_and_a_full_host_are_told(tmp_path, mesh, monkeypatch):
    file = write(tmp_path / "m.safetensors", {"w": np.zeros((64, 64), np.float32)})

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(ar.CheckpointError, match=r"cannot read .*m\.safetensors: Input/output error"):
            checkpoints.load_safetensors(file, {"w": "a b"}, mesh=mesh, rules=RULES)
    header = {"w": entry("U8", (2**20, 2**23), 0, 2**43)}
    file = write_raw(tmp_path / "huge.safetensors", header)
    try:
        os.truncate(file, os.path.getsize(file) + 2**43)
    except OSError:
        pytest.skip("the file system has no sparse files of that size")
    with pytest.raises(ar.CheckpointError, match="there is no memory for a shard") as caught:
        checkpoints.load_safetensors(file, {"w": "a b"}, mesh=mesh, rules=RULES)
    assert caught.value.path == "w"


# Mutated headers

ARRAYS = {
    "embed.weight": np.arange(24, dtype=np.float32).reshape(6, 4),
    "layers.0.up": np.arange(8, dtype=np.int8).reshape(2, 4),
    "layers.1.up": np.arange(8, 16, dtype=np.int8).reshape(2, 4),
    "scale": np.array(2, np.float16),
}
PIECES = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"9", b"-", b"1e3", b"null", b"\\u0000", b"\xff",
          b"F16", b"BF16", b"F4", b"U8", b"shape", b"dtype", b"data_offsets", b"__metadata__", b" ", b"999999999999"]  # fmt: skip


def mutated(content, chance):
    """A file with some bytes, numbers or words of its header changed, or its ends cut."""
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header, data = bytearray(content[8:start]), content[start:]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at, kind = chance.randrange(len(header) or 1), chance.randrange(7)
        if kind == 0:
            header[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            header[at : at + chance.randrange(4)] = chance.choice(PIECES)
        elif kind == 2:
            del header[at : at + chance.randrange(1, 12)]
        elif kind == 3:
            header[at:at] = header[at : at + chance.randrange(1, 40)]
        elif kind == 4 and (digits := [n for n, byte in enumerate(header) if 48 <= byte < 58]):
            header[chance.choice(digits)] = 48 + chance.randrange(10)
        elif kind == 5:
            data = data[: chance.randrange(len(data) + 1)] or data + bytes(chance.randrange(9))
        else:
            first, second = sorted(chance.randrange(len(header) + 1) for _ in range(2))
            header[first:second] = header[first:second][::-1]
    length = (
        len(header) if chance.random() < 0.9 else chance.choice((0, 1, len(header) - 1, 2**40, 2**64 - 1))
    )
    return struct.pack("<Q", max(0, length)) + bytes(header) + data


def judged(path, content):
    """What our reader makes of a file: its arrays as bytes, or nothing."""
    path.write_bytes(content)
    try:
        header = _header.read_header(str(path))
    except ar.CheckpointError:
        return None
    finally:
        path.unlink()  # cutting an old file short takes longer than making a new one
    found = {}
    for name, array in header.arrays.items():
        width = (
            4 if array.dtype is not None and array.dtype.name == "float4_e2m1fn" else array.dtype.itemsize * 8
        )
        size = int(np.prod(array.shape, dtype=object)) * width // 8
        found[name] = (array.shape, content[array.offset : array.offset + size])
    return found


def theirs(safetensors, content):
    """What the reference reader makes of it."""
    try:
        return {
            name: (tuple(one["shape"]), bytes(one["data"])) for name, one in safetensors.deserialize(content)
        }
    except (safetensors.SafetensorError, ValueError):
        return None


def test_ten_thousand_mutated_headers_crash_nothing_and_give_no_wrong_array(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    content = Path(write(tmp_path / "m.safetensors", ARRAYS)).read_bytes()
    chance, accepted = random.Random(0), 0
    for number in range(10_000):
        changed = mutated(content, chance)
        ours, expected = judged(tmp_path / "n.safetensors", changed), theirs(safetensors, changed)
        if ours is not None:
            accepted += 1
            assert ours == expected, (number, changed)
    assert 100 < accepted < 5000  # of both kinds there are many


def test_what_the_reference_reader_takes_is_taken(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    content = Path(write(tmp_path / "m.safetensors", ARRAYS)).read_bytes()
    chance, stricter = random.Random(1), []
    for _ in range(3000):
        changed = mutated(content, chance)
        expected = theirs(safetensors, changed)
        if expected is not None and judged(tmp_path / "n.safetensors", changed) is None:
            stricter.append(changed)
    for changed in stricter:  # it lets the last of two keys win
        (tmp_path / "n.safetensors").write_bytes(changed)
        with pytest.raises(ar.CheckpointError, match="stands twice"):
            _header.read_header(str(tmp_path / "n.safetensors"))
