"""Rules and name tables as values: what they refuse, and their files."""

import copy
import json
import pickle
import re
import subprocess
import sys
import time
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import axisrules as ar

MALFORMED = {
    "a 2-character text as a pair": (["ab"], "rule #0 is 'ab'"),
    "a triple": ([("a", "x", "y")], "rule #0 is ('a', 'x', 'y')"),
    "a single": ([("a",)], "rule #0 is ('a',)"),
    "a set as a pair": ([{"a", "x"}], "rule #0 is {"),
    "a dict as a pair": ([{"a": "x", "b": "y"}], "rule #0 is {'a': 'x', 'b': 'y'}"),
    "an axis twice in a tuple": (
        [("a", "x"), ("b", ("x", "x"))],
        "rule #1 maps 'b' to ('x', 'x'), which has an axis twice",
    ),
    "an int as axis": ([("a", 1)], "rule #0 maps 'a' to 1"),
    "a bool as axis": ([("a", True)], "rule #0 maps 'a' to True"),
    "an int in a tuple": ([("a", ("x", 1))], "in which 1 is not a mesh axis"),
    "None in a tuple": ([("a", ("x", None))], "in which None is not a mesh axis"),
    "a nested tuple": ([("a", ("x", ("y", "z")))], "in which ('y', 'z') is not a mesh axis"),
    "an empty axis": ([("a", "")], "rule #0 maps 'a' to ''"),
    "an empty axis in a tuple": ([("a", ("x", ""))], "in which '' is not a mesh axis"),
    "a set of axes": ([("a", {"x", "y"})], "rule #0 maps 'a' to {"),
    "a dict of axes": ([("a", {"x": 1})], "rule #0 maps 'a' to {'x': 1}"),
    "a generator of axes": ([("a", (c for c in "xy"))], "rule #0 maps 'a' to <generator"),
    "an empty name": ([("", "x")], "rule #0 has the name ''"),
    "None as a name": ([(None, "x")], "rule #0 has the name None"),
    "an int as a name": ({3: "x"}, "rule #0 has the name 3"),
    "bytes as axis": ([("a", b"x")], "rule #0 maps 'a' to b'x'"),
    "a text as rules": ("ab", "'ab' is no sequence of rules"),
    "a set as rules": ({("a", "x")}, "is no sequence of rules"),
    "None as rules": (None, "None is no sequence of rules"),
    "an int as rules": (3, "3 is no sequence of rules"),
    "a generator of the wrong things": ((n for n in (1, 2)), "2 problems"),
}


@pytest.mark.parametrize(("rules", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_rules_are_refused_when_built_with_item_and_position(rules, message):
    with pytest.raises(ar.RulesError) as caught:
        ar.Rules(rules)
    assert message in str(caught.value)


def test_all_malformed_rules_are_named_at_once():
    with pytest.raises(ar.RulesError) as caught:
        ar.Rules([("a", 1), ("b", "x"), ("", "x")])
    assert [failure.rule for failure in caught.value.failures] == [0, 2]


@pytest.mark.parametrize(
    "rules",
    [
        {"a": ("x", "y"), "b": "z", "c": None, "d": ()},
        [("a", ("x", "y")), ("b", "z"), ("c", None), ("d", None)],
        [["a", ["x", "y"]], ["b", ["z"]], ["c", []], ["d", None]],
        ((name, axes) for name, axes in [("a", ("x", "y")), ("b", "z"), ("c", None), ("d", ())]),
        {"a": ("x", "y"), "b": "z", "c": None, "d": ()}.items(),
    ],
)
def test_every_spelling_gives_the_same_rules(rules):
    assert ar.Rules(rules) == ar.Rules([("a", ("x", "y")), ("b", "z"), ("c", None), ("d", None)])


def test_rules_are_immutable_hashable_and_copy_as_themselves():
    rules = ar.Rules({"a": ("x", "y"), "b": None})
    assert pickle.loads(pickle.dumps(rules)) == copy.deepcopy(rules) == rules
    assert hash(ar.Rules({"a": ("x", "y"), "b": ()})) == hash(rules)
    assert len({rules, ar.Rules({"a": ("x", "y"), "b": ()})}) == 1
    assert rules != (("a", ("x", "y")), ("b", None))
    with pytest.raises(AttributeError):
        rules.other = 1


def test_rules_print_as_they_are_written():
    assert repr(ar.Rules({"a": ("x", "y"), "b": None})) == "Rules([('a', ('x', 'y')), ('b', None)])"
    assert str(ar.Rules({"long": ("x", "y"), "b": None})) == "#0 long -> (x, y)\n#1 b    -> None"
    assert str(ar.Rules()) == "no rules"


def test_prepend_append_replace_drop_give_new_rules():
    rules = ar.Rules([("a", "x"), ("b", "y"), ("a", "z")])
    assert list(rules.prepend({"c": "w"})) == [("c", "w"), *rules]
    assert list(rules.append([("c", "w")])) == [*rules, ("c", "w")]
    assert list(rules.replace("a", None)) == [("a", None), ("b", "y")]
    assert list(rules.drop("a")) == [("b", "y")]
    assert list(rules) == [("a", "x"), ("b", "y"), ("a", "z")]


@pytest.mark.parametrize("edit", [lambda r: r.replace("embd", "x"), lambda r: r.drop("embd")])
def test_editing_a_name_that_no_rule_mentions_names_the_nearest(edit):
    with pytest.raises(ar.RulesError, match="no rule mentions 'embd'; did you mean 'embed'?"):
        edit(ar.Rules({"embed": "x"}))


def test_replace_refuses_malformed_axes():
    with pytest.raises(ar.RulesError, match="which has an axis twice"):
        ar.Rules({"a": "x"}).replace("a", ("x", "x"))


FILES = {
    "rules.toml": 'rules = [["batch", ["data", "fsdp"]], ["embed", "fsdp"], ["norm", []]]',
    "rules.json": '[["batch", ["data", "fsdp"]], ["embed", "fsdp"], ["norm", null]]',
    "mapping.json": '{"rules": {"batch": ["data", "fsdp"], "embed": "fsdp", "norm": null}}',
    "published.yml": "base_run: 1\nlogical_axis_rules: [\n  ['batch', ['data', 'fsdp']],\n  ['embed', 'fsdp'],\n  ['norm', []],\n]\nmesh_axes: [data]\n",
    "list.yaml": "- [batch, [data, fsdp]]\n- [embed, fsdp]\n- [norm, null]\n",
    "one-set.toml": '[train]\nrules = [["batch", ["data", "fsdp"]], ["embed", "fsdp"], ["norm", []]]',
}


@pytest.mark.parametrize("name", FILES)
def test_every_published_form_of_a_file_loads(tmp_path, name):
    if name.endswith(("yml", "yaml")):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(FILES[name])
    assert ar.Rules.load(tmp_path / name) == ar.Rules(
        {"batch": ("data", "fsdp"), "embed": "fsdp", "norm": None}
    )


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_several_named_sets_live_in_one_file(tmp_path, suffix):
    if suffix == "yaml":
        pytest.importorskip("yaml")
    path = tmp_path / f"rules.{suffix}"
    train, decode = ar.Rules({"embed": "fsdp"}), ar.Rules([("embed", ("a", "b")), ("mlp", None)])
    train.dump(path, set="train")
    decode.dump(path, set="decode")
    assert ar.Rules.load(path, set="train") == train
    assert ar.Rules.load(path, set="decode") == decode
    with pytest.raises(ar.RulesError, match="holds 2 sets of rules"):
        ar.Rules.load(path)
    with pytest.raises(ar.RulesError, match="has no set 'trian'; did you mean 'train'?"):
        ar.Rules.load(path, set="trian")


def test_a_set_is_added_without_losing_what_else_the_file_holds(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"lr": 1, "rules": [["a", "x"]]}')
    ar.Rules({"b": "y"}).dump(path, set="mine")
    assert json.loads(path.read_text()) == {"lr": 1, "rules": [["a", "x"]], "mine": {"rules": [["b", ["y"]]]}}
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ar.RulesError, match="no table that a named set could be added to"):
        ar.Rules({"b": "y"}).dump(tmp_path / "list.json", set="mine")
    (tmp_path / "deep.toml").write_text("[a.b]\nc = 1\n")
    ar.Rules({"b": "y"}).dump(tmp_path / "deep.toml", set="mine")
    kept = tomllib.loads((tmp_path / "deep.toml").read_text())
    assert kept == {"a": {"b": {"c": 1}}, "mine": {"rules": [["b", ["y"]]]}}
    (tmp_path / "odd.toml").write_text("[a.b]\nc = inf\n")
    with pytest.raises(ar.RulesError, match="without losing other things"):
        ar.Rules({"b": "y"}).dump(tmp_path / "odd.toml", set="mine")
    assert (tmp_path / "odd.toml").read_text() == "[a.b]\nc = inf\n"
    (tmp_path / "plain.json").write_text('{"rules": []}')
    with pytest.raises(ar.RulesError, match="holds rules without a name"):
        ar.Rules.load(tmp_path / "plain.json", set="x")


def test_a_dump_keeps_the_mode_and_follows_a_link(tmp_path):
    real, link = tmp_path / "real.toml", tmp_path / "link.toml"
    ar.Rules({"a": "x"}).dump(real)
    assert real.stat().st_mode & 0o777 != 0o600
    real.chmod(0o640)
    link.symlink_to(real)
    ar.Rules({"a": "y"}).dump(link)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert ar.Rules.load(real) == ar.Rules({"a": "y"})


words = st.text(min_size=1, max_size=6)
any_rules = st.lists(
    st.tuples(words, st.one_of(st.none(), words, st.lists(words, unique=True, max_size=3).map(tuple))),
    max_size=5,
)


@pytest.mark.parametrize("suffix", ["toml", "json"])
@given(pairs=any_rules)
def test_rules_of_any_text_print_and_parse_back(tmp_path_factory, suffix, pairs):
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    rules = ar.Rules(pairs)
    try:
        text = json.dumps(pairs, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate has no place in a file
        with pytest.raises(ar.RulesError, match="cannot write"):
            rules.dump(path)
        return
    assert text
    rules.dump(path)
    assert ar.Rules.load(path) == rules


BAD_FILES = {
    "missing.toml": (None, "cannot read"),
    "rules.txt": ("", "cannot tell the format"),
    "bad.toml": ("rules = [", "cannot read"),
    "bad.json": ("{", "cannot read"),
    "empty.json": ("{}", "holds no set of rules"),
    "number.json": ("3", "holds no set of rules"),
    "null.toml": ("", "holds no set of rules"),
    "malformed.json": ('[["a", 1]]', "rule #0 maps 'a' to 1"),
    "deep.json": ("[" * 100_000, "cannot read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_gives_a_clear_error_with_its_name(tmp_path, name):
    text, message = BAD_FILES[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ar.RulesError, match=re.escape(message)) as caught:
        ar.Rules.load(tmp_path / name)
    assert name in str(caught.value)


def test_a_failed_dump_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "rules.toml"
    ar.Rules({"a": "x"}).dump(path)
    with pytest.raises(ar.RulesError, match="cannot write"):
        ar.Rules({"\ud800": "x"}).dump(path)
    assert ar.Rules.load(path) == ar.Rules({"a": "x"})
    assert [p.name for p in tmp_path.iterdir()] == ["rules.toml"]


def test_yaml_without_its_extra_names_the_extra(tmp_path):
    (tmp_path / "rules.yaml").write_text("- [a, x]\n")
    code = f"""
import sys
sys.modules["yaml"] = None
import axisrules as ar
try:
    ar.Rules.load({str(tmp_path / "rules.yaml")!r})
except ar.MissingExtraError as error:
    assert isinstance(error, ImportError) and isinstance(error, ar.AxisRulesError)
    print(error)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == (
        "YAML files need PyYAML, which is not installed\n  fix:   pip install 'axisrules[yaml]'\n"
    )


# Name tables.

PATTERNS = [
    ("kernel", "kernel", True),
    ("kernel", "a/kernel", False),
    ("*/kernel", "a/kernel", True),
    ("*/kernel", "a/b/kernel", False),
    ("**/kernel", "kernel", True),
    ("**/kernel", "a/b/kernel", True),
    ("a/**/kernel", "a/kernel", True),
    ("a/**/kernel", "b/kernel", False),
    ("layers_*/kernel", "layers_12/kernel", True),
    ("layers_*/kernel", "layers_1/x/kernel", False),
    ("a/**", "a/b/c", True),
    ("a/**", "a", True),
    ("**", "a/b", True),
    ("model.layers.*.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight", True),
    ("model/layers/*/mlp/up_proj/weight", "model.layers.0.mlp.up_proj.weight", True),
    ("model.layers.*.weight", "model.layers.0.mlp.weight", False),
    ("a+b/[c]", "a+b/[c]", True),
    ("a?", "ab", False),
    (re.compile(r"a/\d+/kernel"), "a/12/kernel", True),
    (re.compile(r"a/\d+"), "a/12/kernel", False),
    (re.compile(r"a\.b"), "a.b", True),
    (re.compile(r"a/b"), "a.b", False),
]


@pytest.mark.parametrize(("pattern", "path", "matches"), PATTERNS)
def test_patterns_match_by_segment(pattern, path, matches):
    assert bool(ar.NameTable({pattern: "embed"}).matches(path)) == matches


@pytest.mark.parametrize("pattern", ["*a*a*a*a*a*b", "***********b", "**/**/**/**/a*b*c*/**/x"])
def test_no_pattern_takes_long(pattern):
    started = time.perf_counter()
    assert not ar.NameTable({pattern: None}).matches("a" * 200 + "/" + "abc/" * 50 + "y")
    assert time.perf_counter() - started < 1  # a bad one takes minutes


@pytest.mark.parametrize("path", ["", "w.", "a//b"])
def test_two_stars_match_the_root_and_empty_segments(path):
    assert ar.NameTable({"**": None}).matches(path) == (0,)


def test_tables_pickle():
    table = ar.NameTable({"**/w": "embed _", re.compile("a"): None}, optional=["**/w"])
    assert pickle.loads(pickle.dumps(table)) == table


def test_the_first_pattern_wins_and_all_matches_are_known():
    table = ar.NameTable({"**/q/kernel": "embed heads", "**/kernel": "embed mlp"})
    assert table.find("a/q/kernel") == ("embed", "heads")
    assert table.matches("a/q/kernel") == (0, 1)
    with pytest.raises(KeyError):
        table.find("a/bias")


def test_numbers_in_patterns_are_told_apart():
    table = ar.NameTable({"layers/1/w": "embed", "layers/*/w": "mlp"})
    assert table.find("layers/1/w") == ("embed",)
    assert table.find("layers/2/w") == table.find("layers/11/w") == ("mlp",)


BAD_TABLES = {
    "a text": ("ab", "is no table of names"),
    "a set": ({"a"}, "is no table of names"),
    "None": (None, "is no table of names"),
    "a triple": ([("a", "b", "c")], "entry #0 is"),
    "an empty pattern": ({"": "embed"}, "the pattern of entry #0"),
    "an int as names": ({"a": 3}, "entry #0 (a): 3 cannot name"),
    "an unconstrained dimension": ({"a": "* embed"}, "dimension 0 is unconstrained"),
    "dots twice": ({"a": "... embed ..."}, "'...' more than once"),
}


@pytest.mark.parametrize(("entries", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_malformed_tables_are_refused_when_built(entries, message):
    with pytest.raises(ar.NameTableError, match=re.escape(message)):
        ar.NameTable(entries)


def test_an_optional_pattern_has_to_be_in_the_table():
    with pytest.raises(ar.NameTableError, match="optional pattern 'b'"):
        ar.NameTable({"a": "embed"}, optional=["b"])


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_tables_dump_and_load(tmp_path, suffix):
    if suffix == "yaml":
        pytest.importorskip("yaml")
    table = ar.NameTable(
        {
            "**/kernel": "embed _ mlp",
            "**/scale": None,
            "head": "... vocab",
            "odd": ("a b", None, "_"),
            "s": (),
        },
        optional=["head"],
    )
    table.dump(tmp_path / f"names.{suffix}")
    assert ar.NameTable.load(tmp_path / f"names.{suffix}") == table


def test_a_compiled_pattern_has_no_form_in_a_file(tmp_path):
    with pytest.raises(ar.NameTableError, match="compiled pattern"):
        ar.NameTable({re.compile("a"): "embed"}).dump(tmp_path / "names.toml")


def test_a_table_file_without_names_is_refused(tmp_path):
    (tmp_path / "names.toml").write_text("x = 1")
    with pytest.raises(ar.NameTableError, match="has no table 'names'"):
        ar.NameTable.load(tmp_path / "names.toml")
