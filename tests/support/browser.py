"""A real browser without a window: what a user does and sees, and the pictures of the documentation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    NoSuchElementException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver import ChromeOptions, Remote
from selenium.webdriver.chrome.remote_connection import ChromeRemoteConnection
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.servers import running
from tests.support.settings import ROOT

T = TypeVar("T")
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # as root there is none
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--window-size=1500,1100",
)
PICTURES_VARIABLE = "STREAM_ASSETS_PICTURES"
IMAGES = ROOT / "docs" / "images"
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.2
# What a page says that is being drawn anew.
UNSETTLED = (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    NoSuchElementException,
    StaleElementReferenceException,
)


@dataclass(frozen=True, slots=True)
class Browser:
    """What a user does and sees; what does not come true leaves a screenshot behind.

    Args:
        driver: the browser.
        screenshots: the folder for them.
    """

    driver: Remote
    screenshots: Path

    def open(self, url: str) -> None:
        """Go to a page."""
        self.driver.get(url)

    def find(self, xpath: str) -> WebElement:
        """The first element that is there and visible; waits for it."""

        def find() -> WebElement | None:
            found = self.driver.find_elements("xpath", xpath)
            return next((element for element in found if element.is_displayed()), None)

        return self.until(find, what=xpath)

    def click(self, words: str) -> None:
        """A link, tab or button with these words on it, or an element at an xpath; waits until it can be clicked."""
        controls = "self::a or self::button or @role='button' or @role='tab'"
        xpath = words if words.startswith("/") else f"//*[{controls}][normalize-space()='{words}']"

        def click() -> bool:
            element = self.driver.find_element("xpath", xpath)
            if element.is_enabled():
                element.click()
                return True
            return False

        self.until(click, what=f"{words!r} to be clicked")

    def text(self) -> str:
        """All that can be read on the page."""
        return self.driver.find_element("tag name", "body").text

    def see(self, *words: str, seconds: float = WAIT_SECONDS) -> str:
        """The text of the page, when all these words are in it."""

        def read() -> str | None:
            text = self.text()
            return text if all(word in text for word in words) else None

        return self.until(read, seconds=seconds, what=f"{words} on the page")

    def picture(self, name: str, *, top: str | None = None) -> None:
        """The page as the pictures of the documentation show it; ``make pictures`` keeps it as one.

        Args:
            name: of the picture.
            top: words that are to be at its top.
        """
        self.driver.execute_script("document.activeElement?.blur()")
        if top:
            self.driver.execute_script("arguments[0].scrollIntoView()", self.find(f"//*[text()='{top}']"))
        folder = IMAGES if PICTURES_VARIABLE in os.environ else self.screenshots
        assert self.driver.save_screenshot(str(folder / f"{name}.png"))

    def until(self, condition: Callable[[], T | None], *, seconds: float = WAIT_SECONDS, what: str) -> T:
        """The first truthy value of ``condition``.

        Raises:
            AssertionError: with the place of a screenshot, after ``seconds``.
        """
        waiting: Any = WebDriverWait(self.driver, seconds, POLL_SECONDS, ignored_exceptions=UNSETTLED)
        try:
            value: T = waiting.until(lambda _: condition())
        except TimeoutException as error:
            picture = self.screenshots / f"page-{len(list(self.screenshots.glob('*.png')))}.png"
            self.driver.save_screenshot(str(picture))
            raise AssertionError(
                f"no {what} within {seconds} s at {self.driver.current_url}; see {picture}\n{self.text()}"
            ) from error
        return value


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser; its profile, its log and its screenshots are in ``folder``."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    driver = shutil.which(DRIVER)
    assert program, f"there is no browser ({', '.join(PROGRAMS)}): install chromium; make test-all does it where it may"
    assert driver, f"there is no {DRIVER}: install chromium-driver; make test-all does it where it may"
    options = ChromeOptions()
    options.binary_location = program
    for option in (*OPTIONS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(option)
    command = [driver, "--port=0"]
    with running("chromedriver", command, folder / "driver.log") as server:
        (port,) = server.until(
            lambda: server.said(r"started successfully on port (\d+)"), seconds=WAIT_SECONDS, what="its start"
        )
        # The driver listens on the loopback interface, which no proxy reaches.
        with patch.dict(os.environ, no_proxy="*"):
            made = Remote(ChromeRemoteConnection(f"http://127.0.0.1:{port}"), options=options)
            try:
                yield Browser(made, folder)
            finally:
                made.quit()
                shutil.rmtree(folder / "profile", ignore_errors=True)
