"""Prices on the page of a plan: what stands there, where from, and what is declined."""

import html
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axisrules as ar
from axisrules import cost, report

pytest.importorskip("jinja2")

from tests.pricing import Adam

TREE = {
    "up": jax.ShapeDtypeStruct((512, 2048), jnp.float32),
    "down": jax.ShapeDtypeStruct((2048, 512), jnp.float32),
}
NAMES = {"up": "embed mlp", "down": "mlp embed"}
RULES = {"batch": "data", "embed": "data", "mlp": "model"}


def plan(rules=RULES, mesh="data=4,model=2", **options):
    return ar.plan(TREE, NAMES, mesh=mesh, rules=rules, indivisible="next", unmapped="replicate", **options)


def shown(tmp_path, plans, **options):
    """The tables of prices of every plan, and the whole text."""
    path = tmp_path / "p.html"
    report.page(plans, path, **options)
    text = path.read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    return [one["costs"] for one in data["plans"]], text


def test_without_hardware_no_prices_are_shown(tmp_path):
    (found,), text = shown(tmp_path, plan())
    assert found == []
    assert 'id="costs"' not in text


def test_memory_and_traffic_are_those_of_the_plan(tmp_path):
    (found,), text = shown(tmp_path, plan(), hardware="TPU v5e", optimizer=Adam)
    assert 'id="costs"' in text
    memory, traffic, *sources = found
    held = cost.memory(plan(), Adam, hardware="TPU v5e")
    assert memory["rows"] == [
        *([kind, f"{size:,}"] for kind, size in held.kinds.items()),
        ["all", f"{held.bytes_per_device:,}"],
    ]
    assert held.verdict in memory["title"]
    assert memory["notes"] == [f"Source: {held.source}"]
    moved = cost.traffic(plan(), hardware="TPU v5e")
    assert {row[0]: row[1] for row in traffic["rows"]} == {
        axis: f"{size:,}" for axis, size in moved.wire_bytes_per_axis.items()
    }
    assert traffic["rows"][0][2] == f"{moved.seconds_per_axis['data'] * 1e3:,.2f} ms"
    assert traffic["notes"][-1] == f"Source: {moved.source}"
    assert [one["title"] for one in sources] == [
        f"Figures of TPU v5e: {source}" for source in cost.hardware("TPU v5e").source
    ]


def test_what_a_plan_cannot_tell_has_its_reason_instead_of_a_number(tmp_path):
    (found,), _ = shown(tmp_path, plan({"batch": "data", "embed": "data"}), hardware="v5e")
    moved = cost.traffic(plan({"batch": "data", "embed": "data"}))
    assert moved.reasons
    for axis, reason in moved.reasons.items():
        assert f"No number for {axis}: {reason}." in found[1]["notes"]
        assert axis not in [row[0] for row in found[1]["rows"]]


def test_rules_that_name_no_batch_still_have_a_page(tmp_path):
    rules = {"rows": "data", "embed": "data", "mlp": "model"}
    (found,), _ = shown(tmp_path, plan(rules), hardware="v5e")
    assert found[1]["title"].endswith(": unknown")
    assert "no rule mentions 'batch'" in found[1]["notes"][0]
    (found,), _ = shown(tmp_path, plan(rules), hardware="v5e", batch="rows")
    assert found[1]["rows"]


def test_an_unknown_figure_is_said_to_be_unknown(tmp_path):
    (found,), _ = shown(tmp_path, plan(), hardware=cost.Hardware("mine"))
    assert "whether it fits is unknown" in found[0]["title"]
    assert found[1]["rows"][0][2] == "unknown"
    assert len(found) == 2


@pytest.mark.parametrize("tree", [{}, np.zeros(8, np.float32), {"n": np.zeros((4, 0), np.int32)}])
def test_odd_trees_have_prices_too(tree, tmp_path):
    odd = ar.plan(tree, lambda path, leaf: None, mesh="data=8", rules={"batch": "data"})
    (found,), _ = shown(tmp_path, odd, hardware="H100", optimizer=Adam)
    assert len(found) >= 2


def test_what_lies_on_the_host_is_told_apart(tmp_path):
    (found,), _ = shown(tmp_path, plan(memory_kind="pinned_host"), hardware="v5e")
    assert found[0]["rows"][-1] == ["on the host", f"{plan().bytes_per_device:,}"]


def test_every_plan_has_its_own_prices(tmp_path):
    (first, second), _ = shown(tmp_path, {"2D": plan(), "1D": plan(mesh="data=8,model=1")}, hardware="v5e")
    assert first != second


def test_the_page_still_fetches_nothing_and_no_name_breaks_out(tmp_path):
    chip = cost.Hardware("</script><script>alert(1)</script>", source=("<img src='http://x/'>",))
    _, text = shown(tmp_path, plan(), hardware=chip)
    assert not re.search(r"<(link|script|img)[^>]+(src|href)=[\"'](?!data:)", html.unescape(text))
    assert text.count("</script>") == 2


@pytest.mark.parametrize("given", ["v5f", 3])
def test_unknown_hardware_is_refused_before_a_file_is_written(given, tmp_path):
    with pytest.raises(ar.HardwareError):
        report.page(plan(), tmp_path / "p.html", hardware=given)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_without_hardware_is_not_dropped_in_silence(tmp_path):
    with pytest.raises(ar.PolicyError, match="with the memory of an accelerator alone") as caught:
        report.page(plan(), tmp_path / "p.html", optimizer=Adam)
    assert caught.value.fix == 'pass hardware="TPU v5e", too.'
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_shows_the_prices_of_the_chosen_plan(width, tmp_path):
    selenium = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("there is no chromium with its chromedriver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    plans = {"2D": plan(), "1D": plan({"batch": "data", "embed": "data"})}
    report.page(plans, tmp_path / "p.html", hardware="v5e", optimizer=Adam)
    with selenium.Chrome(options=options, service=selenium.ChromeService(executable_path=driver)) as browser:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get((tmp_path / "p.html").as_uri())
        first = browser.find_element("css selector", "#costs").text
        assert f"{cost.memory(plan(), Adam, hardware='v5e').bytes_per_device:,}" in first
        browser.execute_script(
            "const s = document.getElementById('plan'); s.value = 1; s.dispatchEvent(new Event('change'))"
        )
        assert "nothing uses model" in browser.find_element("css selector", "#costs").text
        widths = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert widths[0] <= widths[1]
