"""Draws docs/page.png: the page of a small swarm on this machine, of which one node has been killed. Needs Chromium."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import expect, sync_playwright

from bootstrap.run_file import change_settings, write_preset
from node.local_swarm import LocalSwarm, follow

PICTURE = Path(__file__).parent.parent / "docs" / "page.png"
ROUNDS = 16
"""Before a node is killed."""
PATIENCE = 600_000
"""Milliseconds."""


def main() -> None:
    """Start the swarm, wait, and draw."""
    chromium = shutil.which("chromium") or sys.exit("bench: there is no chromium here")
    with TemporaryDirectory(prefix="spes-page-") as name, LocalSwarm(Path(name)) as swarm:
        run = Path(name) / "run.toml"
        write_preset("demo", run)
        changes = {"round.total": 60, "round.start_nodes": 3, "model.expert_size": 64}
        merging = {"merge.alpha": 0.1, "merge.every_steps": 50, "merge.first_steps": 500, "merge.donors": 2}
        change_settings(run, {**changes, **merging})
        swarm.start_rendezvous(run)
        node = swarm.start_node("brisk-otter", "--dashboard", "0")
        swarm.start_node("calm-heron")
        victim = swarm.start_node("eager-puffin")
        address = next(filter(None, (re.search(r"page +(http\S+)", line) for line in follow(node))))[1]
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            page.goto(address)
            expect(page).to_have_title(re.compile(rf"round {ROUNDS}\b"), timeout=PATIENCE)
            os.killpg(victim.process.pid, signal.SIGKILL)
            expect(page.locator("table.nodes .state.bad")).to_contain_text("lost", timeout=PATIENCE)
            page.wait_for_timeout(8000)
            page.screenshot(path=PICTURE, full_page=True)
            browser.close()
    print(PICTURE)


if __name__ == "__main__":
    main()
