"""What people look at during a takeover is what the server says: the page in a real browser, doctor, verify."""

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from urllib.request import urlopen

import pytest
from playwright.sync_api import Page, sync_playwright

from laboratory.servers import Postgres, wait_until
from laboratory.service import PREFIX, QUICK, ROLES, Fleet, Replica, Service

pytestmark = pytest.mark.slow

WAITS = "scheduler"  # its effects are external, so its successor waits out an unclean end
SLOW = {"INTERVAL_SECONDS": "1", "TTL_SECONDS": "14", "STOP_GRACE_SECONDS": "2"}  # a takeover of 12 s
BROWSER = {"executable_path": "/usr/bin/chromium", "args": ["--no-sandbox", "--disable-dev-shm-usage"]}
ROW = re.compile(r'data-label="Role">(\w+)<.*?"State">\S+ (\w+) .*?"Leader">(?:nobody|\S+ \(pid (\d+)\))<')


def address(replica: Replica) -> str:
    """Where a replica serves its page, by its log."""
    found = wait_until(lambda: re.search(r'"url": "(http://\S+?)"', replica.log), 15, "it listens")
    return str(found[1])


def page_says(url: str) -> dict[str, tuple[str, int | None]]:
    """Of each role, by the page: its state, and the pid of who has its lock."""
    with urlopen(url, timeout=10) as answer:
        html = unescape(answer.read().decode())
    return {role: (state, int(pid) if pid else None) for role, state, pid in ROW.findall(html)}


def doctor_says(service: Service, url: str) -> dict[str, int | None]:
    """Of each role, by doctor: the pid of who has its lock."""
    checks = json.loads(service.call("doctor", "--json", url=url).stdout)
    seen = [check["seen"] for check in checks if check["name"] == "leaders"]
    return {s.partition(":")[0]: int(found[1]) if (found := re.search(r"\(pid (\d+)", s)) else None for s in seen}


def test_during_a_takeover_page_doctor_and_verify_say_what_pg_locks_says(fleet: Fleet, service: Service) -> None:
    url = fleet.postgres.url()
    leader, standby = fleet.line_up(1, environment=SLOW)
    page = address(standby)
    states: set[tuple[str, str]] = set()
    compared = 0

    def compare() -> None:
        nonlocal compared
        before, says, after = fleet.holders(), page_says(page), fleet.holders()
        if before == after:  # else it changed while we looked
            assert {role: pid for role, (_, pid) in says.items()} == {role: before.get(role) for role in ROLES}
            states.update((role, state) for role, (state, _) in says.items())
            compared += 1

    compare()
    leader.signal(signal.SIGKILL)
    wait_until(lambda: page_says(page)[WAITS][0] == "waiting", 10, "the page shows the takeover")
    before, says, after = fleet.holders(), doctor_says(service, url), fleet.holders()
    assert before == after, "a takeover is under way all the while"
    assert says == {role: before.get(role) for role in ROLES}
    quick = {f"{PREFIX}{name}": value for name, value in QUICK.items()}
    verified = service.call("verify", "--json", url=url, **quick)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert fleet.holders() == before, "verify left the roles alone"
    deadline = time.monotonic() + 30
    while page_says(page)[WAITS][0] != "leading":
        compare()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    compare()
    assert {(WAITS, "waiting"), (WAITS, "leading")} <= states
    assert compared > 10
    assert doctor_says(service, url) == fleet.holders()
    fleet.assert_safe()


@contextmanager
def browser(url: str, **options: object) -> Iterator[Page]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(**BROWSER)  # type: ignore[arg-type]
        try:
            page = chromium.new_page(**options)  # type: ignore[arg-type]
            complaints: list[str] = []
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(url)
            yield page
            assert [text for text in complaints if "favicon" not in text] == []
        finally:
            chromium.close()


@pytest.mark.needs("chromium")
def test_a_person_sees_a_takeover_without_touching_anything(fleet: Fleet) -> None:
    leader, standby = fleet.line_up(1, environment=SLOW)
    with browser(address(standby), viewport={"width": 1280, "height": 900}) as page:
        row = page.locator("tr", has_text=WAITS).first
        assert "● leading" in row.inner_text()
        assert f"{leader.pid}-" in row.inner_text()
        leader.signal(signal.SIGKILL)
        page.locator("tr", has_text=WAITS).filter(has_text="◐ waiting").first.wait_for(timeout=20_000)
        page.locator("tr", has_text=WAITS).filter(has_text="● leading").first.wait_for(timeout=30_000)
        text = page.locator("body").inner_text()
        assert f"{standby.pid}-" in page.locator("tr", has_text=WAITS).first.inner_text()
        takeovers = text.partition("Takeovers")[2]
        assert "Only those that this replica saw itself" in takeovers
        assert re.search(rf"{WAITS}\s+2\s+{standby.pid}-", takeovers)
        assert "postgresql://" not in page.content()


@pytest.mark.needs("chromium")
def test_the_page_is_readable_on_a_phone_in_the_dark_and_without_colour(fleet: Fleet) -> None:
    fleet.start(1)
    leaders = fleet.wait_for_leaders()
    url = address(leaders[WAITS])
    with browser(url, viewport={"width": 320, "height": 640}, color_scheme="dark", forced_colors="none") as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, "nothing is cut off or scrolls sideways"
        assert luminance(page, "backgroundColor") < 0.1
        assert luminance(page, "color") > 0.7
        smallest = page.evaluate(
            "Math.min(...[...document.querySelectorAll('td')].map(e => parseFloat(getComputedStyle(e).fontSize)))"
        )
        assert smallest >= 14
        label = page.evaluate("getComputedStyle(document.querySelector('td'), '::before').content")
        assert label == '"Role"', "a row of the table is a card, each value with its name"
        page.emulate_media(color_scheme="light")
        assert luminance(page, "backgroundColor") > 0.9
        assert luminance(page, "color") < 0.1
        page.emulate_media(forced_colors="active")
        assert "● leading" in page.locator("body").inner_text()
    with browser(url, viewport={"width": 1280, "height": 900}, java_script_enabled=False) as page:
        assert "● leading" in page.locator("body").inner_text()


def luminance(page: Page, what: str) -> float:
    """Of the body's colour, from 0 to 1."""
    rgb = page.evaluate(f"getComputedStyle(document.body).{what}.match(/\\d+/g).slice(0, 3).map(Number)")
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])


@pytest.mark.needs("pgbouncer")
def test_verify_sees_a_real_pooler(pgbouncer: object, service: Service, postgres: Postgres) -> None:
    bouncer = pgbouncer("transaction", 20)  # type: ignore[operator]
    quick = {f"{PREFIX}{name}": value for name, value in QUICK.items()}
    work = service.call("verify", url=bouncer.url(), **quick, **{f"{PREFIX}LEASE_DATABASE_URL": postgres.url()})
    assert work.returncode == 0, work.stdout + work.stderr
    assert f"a lease through {PREFIX}DATABASE_URL would be rejected" in work.stdout
    lease = service.call("verify", url=bouncer.url(), **quick)
    assert lease.returncode == 1
    assert "rejected, as it must be" in lease.stdout
    assert f"set {PREFIX}LEASE_DATABASE_URL" in lease.stdout
    session = pgbouncer("session", 20)  # type: ignore[operator]
    pooled = service.call("verify", url=session.url(), **quick)
    assert pooled.returncode == 0, pooled.stdout + pooled.stderr
    assert "the lease's URL is session-pooled" in pooled.stdout
    with postgres.connect() as conn:
        rows = conn.execute("select acquired_at from acme_billing.lease where role = 'verify'").fetchall()
    assert set(rows) == {(None,)}, "no key is in use any more"
