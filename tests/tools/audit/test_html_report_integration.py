"""What a reader sees who opens the HTML report: in headless Chromium."""

from __future__ import annotations

import json
import time

import pytest

from audit_samples import equal_report, parted_report, replace_texts
from browser import CHROMIUM, Browser
from unisono._src.tools.audit.html_report import render_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

HOSTILE = (
    "\"'</style><script>ran = 1</script><img src=https://example.com/x onerror='ran = 1'><svg onload='ran = 1'>/層"
    + "/an_encoder_with_a_long_name" * 8
    + "x" * 200
)
UNWANTED = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    for domain in ("Page", "Network", "Log", "Runtime"):
        browser.ask(f"{domain}.enable")
    yield browser
    browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open a page at some width, light or dark, and return what was asked of the network and what the console says."""

    def open_page(page: str, width: int = 1280, scheme: str = "light") -> tuple[list[str], list[dict]]:
        (tmp_path / "report.html").write_text(page)
        address = (tmp_path / "report.html").as_uri()
        browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.ask("Page.navigate", url="about:blank")
        browser.events.clear()
        browser.ask("Page.navigate", url=address)
        until = time.monotonic() + 60
        while value(browser, "[location.href, document.readyState]") != [address, "complete"]:
            assert time.monotonic() < until, "the page was not loaded"
            time.sleep(0.05)
        time.sleep(0.3)  # for what a page may ask for after it was loaded
        value(browser, "0")  # events come before an answer
        asked = [event["params"]["request"]["url"] for event in browser.events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if url != address], [event for event in browser.events if event["method"] in UNWANTED]

    return open_page


def value(browser, expression):
    return json.loads(browser.ask("Runtime.evaluate", expression=f"JSON.stringify({expression})")["result"]["value"])


@pytest.mark.parametrize(
    ("report", "verdict", "width", "ground"),
    [
        (equal_report(), "Same bits on all placements", 1280, "rgb(252, 252, 250)"),
        (parted_report(), "The runs part at step 2, in block/attention/query", 360, "rgb(20, 23, 27)"),
        (replace_texts(parted_report(), lambda _: HOSTILE), f"The runs part at step 2, in {HOSTILE}", 360, "rgb(252, 252, 250)"),
    ],
    ids=["equal", "parted", "hostile"],
)
def test_the_page_opens_without_a_network_and_shows_the_verdict(browser, opened, report, verdict, width, ground):
    asked, console = opened(render_report(report), width, "dark" if ground == "rgb(20, 23, 27)" else "light")
    assert (asked, console) == ([], [])
    assert value(browser, "typeof ran") == "undefined"
    assert verdict in value(browser, "document.querySelector('h1').innerText")
    assert value(browser, "document.querySelector('h1').getBoundingClientRect().top") < 200
    assert value(browser, "document.documentElement.scrollWidth") <= width
    assert value(browser, "getComputedStyle(document.body).backgroundColor") == ground
    drawn = value(browser, "[...document.querySelectorAll('svg[role=img]')].map(svg => svg.getBoundingClientRect().width)")
    assert len(drawn) == 1 + 3 * (report.difference is not None)
    assert min(drawn) > 60


def test_the_policy_holds_where_escaping_would_not(browser, opened):
    """A script and a picture that were put in as they are do nothing, and the browser says that the policy is why."""
    put_in = "<script>ran = 1</script><img src='https://example.com/x' onerror='ran = 1'>"
    asked, console = opened(render_report(equal_report()).replace("<main>", f"<main>{put_in}"))
    blocked = [event["params"].get("blockedReason") for event in browser.events if event["method"] == "Network.loadingFailed"]
    assert value(browser, "typeof ran") == "undefined"
    assert asked == ["https://example.com/x"]
    assert blocked == ["csp"]
    assert "Content Security Policy" in json.dumps(console)
