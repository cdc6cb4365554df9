"""The page of a node in a real browser, before a real swarm."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from node.local_swarm import LocalSwarm, follow
from tests.test_swarm import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]
LEASE_SECONDS = 4
BUSY_SECONDS = 6
"""For looks that come late on a machine that does other things, too."""
SOON = 60_000
"""Milliseconds for what takes some seconds on a machine that is not busy."""
EVIL = '<img src=x onerror="document.title=1">'
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


@pytest.fixture
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield opened
        opened.close()


def open_page(browser: Browser, address: str, errors: list[str], width: int = 1200) -> Page:
    """A page that puts every error in it into a list."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.on("pageerror", lambda error: errors.append(f"{error}: {error.stack}"))
    page.goto(address)
    return page


def row(page: Page, name: str) -> str:
    """What the table says of a node."""
    return page.locator("table.nodes tbody tr", has=page.get_by_text(name, exact=True)).inner_text()


def test_the_page_shows_a_swarm_as_it_is(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path, {"round.total": 0, "round.start_nodes": 2, "round.lease_seconds": LEASE_SECONDS})
    errors = list[str]()
    with LocalSwarm(tmp_path) as swarm:
        swarm.start_rendezvous(run, "--dashboard", "0")
        assert swarm.rendezvous is not None
        address = next(filter(None, (re.search(r"page +(http\S+)", line) for line in follow(swarm.rendezvous))))[1]
        swarm.start_node("ann")
        victim = swarm.start_node(EVIL)
        page = open_page(browser, address, errors)

        # the run and its figures
        expect(page.locator("h1")).to_contain_text("tiny-test")
        expect(page.locator(".figures")).to_contain_text("4/4", timeout=SOON)
        expect(page.locator(".chart canvas")).to_have_count(4, timeout=SOON)
        expect(page).to_have_title(re.compile(r"round ([2-9]|\d\d)"), timeout=SOON)
        expect(page.locator("table.map td.held")).to_have_count(4)
        expect(page.locator(".updated")).to_contain_text(re.compile("now|ago"))

        # what a peer says of itself is text
        expect(page.locator("table.nodes").get_by_text(EVIL)).to_be_visible()
        assert page.locator("main img").count() == 0

        # past rounds, with the keyboard alone
        slider = page.get_by_role("slider")
        slider.focus()
        slider.press("Home")
        expect(page.locator(".scrubber label")).to_have_text(re.compile(r"^round [01]\b"))
        expect(page.locator(".facts")).to_contain_text("led by")
        page.get_by_role("button", name="live").press("Enter")
        expect(page.get_by_role("button", name="live")).to_be_disabled()

        # a phone: nothing is wider than the screen
        phone = open_page(browser, address, errors, width=360)
        expect(phone.locator("table.nodes")).to_be_visible(timeout=SOON)
        assert phone.evaluate("document.documentElement.scrollWidth") <= 360

        # a node is killed
        os.killpg(victim.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        expect(page.locator("table.nodes .state.bad")).to_contain_text("lost", timeout=SOON)
        assert time.monotonic() - killed < LEASE_SECONDS + BUSY_SECONDS, (
            "its lease ends, and the page looks every second"
        )
        assert "lost" in row(page, EVIL) and "lost" not in row(page, "ann")
        expect(page.locator(".events")).to_contain_text("is not heard of any more")
        expect(page.locator("table.map tfoot tr").first).to_contain_text(re.compile("owners1111"), timeout=SOON)

        # the node that serves the page goes
        swarm.rendezvous.process.terminate()
        expect(page.get_by_role("alert")).to_contain_text("does not answer", timeout=SOON)
        assert errors == []
