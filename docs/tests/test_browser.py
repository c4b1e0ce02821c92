"""The site in a browser: what opens, fits, is found and can be read.

It needs `pip install -e ".[docs]"`, and Debian's `chromium` and `chromium-driver`. With
`SCREENSHOTS=folder` in the environment it keeps pictures of first screens.
"""

import fcntl
import functools
import http.server
import io
import os
import pathlib
import re
import shutil
import threading
import urllib.parse

import pytest

pytest.importorskip("selenium", reason="the docs extra is not installed: no selenium")
axe_core = pytest.importorskip("axe_core_python")
test_site = pytest.importorskip("test_site")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="there is no Chromium with its driver"
    ),
]

WIDTHS = (1400, 390)
SCREENSHOTS = os.environ.get("SCREENSHOTS")
COLORS = {"default": "light", "slate": "dark"}
SHOWN = {
    "": "home",
    "tutorial/first_run/": "first_run",
    "guides/settings/": "settings",
    "recipes/": "recipes",
}
AXE = pathlib.Path(axe_core.__file__).with_name("axe.min.js")
RULES = (
    "color-contrast",
    "empty-heading",
    "heading-order",
    "image-alt",
    "link-name",
    "page-has-heading-one",
)
DARK = (
    "",
    "tutorial/reading/",
    "gallery/",
    "api/estimators/",
    "research/optimizers/",
    "methods/",
)
# Pages with pictures of `docs/scripts/pictures.py`.
DRAWN = ("", "black_boxes/", "gallery/", "guides/how_it_decides/")
# Term -> a page that is found by it.
TERMS = {
    "low_rank": "api/low_rank/",
    "radazo": "api/radazo/",
    "minimize": "api/minimize/",
    "orthonormal": "api/orthonormal/",
    "ScaleByRadazoState": "api/transforms.ScaleByRadazoState/",
    "by_group": "api/shaping.by_group/",
    "axis_name": "api/sharded/",
    "value_and_grad": "api/value_and_grad/",
    "max_evaluations": "api/minimize/",
    "custom distribution": "api/custom/",
    "journal": "api/black_boxes/",
    "smoothing": "guides/settings/",
    "TensorBoard": "api/history/",
    "diagnose": "tutorial/choosing/",
    "LoRA": "guides/language_models/",
    "reward": "guides/rewards/",
    "MuJoCo": "black_boxes/",
    "Dask": "guides/many_machines/",
    "Keras": "stacks/",
    "federated": "recipes/federated/",
    "privacy": "recipes/federated/",
    "pandas": "recipes/journals/",
    "nnx": "recipes/nnx/",
    "restarts": "recipes/early_stopping/",
    "least squares": "recipes/fit/",
    "categories": "guides/coming_from/",
    "notebook": "tutorial/",
    "leaf": "glossary/",
    "EGGROLL": "guides/coming_from/",
    "failing evaluation": "faq/",
    "write an estimator": "guides/custom/",
}
# Term of a newcomer -> the page that is found first.
FIRST = {
    "freeze": "recipes/freeze/",
    "batchnorm": "recipes/batchnorm/",
    "early stopping": "recipes/early_stopping/",
    "tolerance": "recipes/early_stopping/",
    "learning rate": "recipes/learning_rate/",
    "bounds": "black_boxes/",
    "nan": "faq/",
    "slow": "faq/",
    "compile": "faq/",
    "gpu": "gpus/",
    "resume": "recipes/checkpoints/",
    "scipy": "guides/coming_from/",
    "maximize": "recipes/maximize/",
    "integer": "faq/",
    "noise": "faq/",
    "checkpoint": "recipes/checkpoints/",
    "mezo": "guides/coming_from/",
    "spsa": "api/spsa/",
    "evolution strategy": "api/evolution_strategy/",
    "memory": "guides/settings/",
}
# In tables: words on several lines, apart from breaks that the page allows.
BROKEN_WORDS = """
const broken = [];
for (const cell of document.querySelectorAll("article table :is(th, td)")) {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    for (const word of text.data.matchAll(/[^\\s\\-\u2013/]+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map(r => Math.round(r.top)));
      if (tops.size > 1) broken.push(word[0]);
    }
  }
}
return broken"""
# Figures that a dark page shows on white: they are neither inverted nor drawn twice.
WHITE = """
return [...document.querySelectorAll("article img")].filter(x =>
  x.offsetWidth && getComputedStyle(x).filter === "none" &&
  !x.src.includes("_dark.png") && !x.src.endsWith(".svg")).map(x => x.src)"""
PHOTOGRAPHS = ("mujoco_rollout.png",)
# The pictures of a page that are shown: what the browser chose, its width in pixels if
# it fills its place, and the color of the page.
PICTURES = """
const page = getComputedStyle(document.body).backgroundColor;
return [...document.querySelectorAll("article img")].filter(x => x.offsetWidth)
  .map(x => [new URL(x.currentSrc).pathname.slice(1), x.naturalWidth *
    Math.min(x.width / x.naturalWidth, x.height / x.naturalHeight), page])"""
SMALL_LETTERS = """
const small = [];
const texts = document.createTreeWalker(
  document.querySelector("article"), NodeFilter.SHOW_TEXT);
for (let text = texts.nextNode(); text; text = texts.nextNode()) {
  const size = parseFloat(getComputedStyle(text.parentElement).fontSize);
  const outside = text.parentElement.closest("math, script, .md-annotation");
  if (text.data.trim() && text.parentElement.offsetWidth && size < arguments[0]
    && !outside) small.push([size, text.data.trim().slice(0, 20)]);
}
return small"""
LEAST = 10  # Pixels of letters.
# What the outputs of the notebooks say, and how many figures they have.
OUTPUTS = {
    "first_run": (r"after 600 steps", 2),
    "choosing": (r"Orthonormal +\S+ above the minimum", 2),
    "black_boxes": (r"it lands after \d+\.\d+ m", 1),
    "networks": (r"9\d\.\d% right", 2),
    "devices": (r"f32\[16\]\S* all-gather", 0),
    "reading": (r"of 8000 values failed", 4),
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        del args


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. One worker builds it, and the other workers wait."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return test_site.build(tmp_path_factory.mktemp("site"), "yes")
    shared = tmp_path_factory.getbasetemp().parent
    with open(shared / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "site").exists():
            built = test_site.build(tmp_path_factory.mktemp("site"), "yes")
            built.rename(shared / "site")
    return shared / "site"


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def pages(site):
    """The paths of all pages, relative to the address."""
    found = [path.parent.relative_to(site) for path in site.rglob("index.html")]
    paths = sorted("" if path.name == "" else f"{path.as_posix()}/" for path in found)
    assert len(paths) > 25
    return paths


@pytest.fixture(scope="module")
def kinds(pages):
    """The pages, but only every tenth of those that are generated for a name."""
    named = {f"api/{name}/" for name in test_site.NAMES}
    assert named <= set(pages)
    return [page for page in pages if page not in named] + sorted(named)[::10]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for option in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):
        options.add_argument(option)
    service = webdriver.ChromeService(executable_path=DRIVER)
    with webdriver.Chrome(options, service) as driver:
        yield driver


def resize(browser, width, height=1000):
    """Sets the size of the page itself: a window has a least width."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def some(parent, selector):
    return parent.find_elements("css selector", selector)


def one(parent, selector):
    return parent.find_element("css selector", selector)


def wait(browser, condition, said):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 10).until(lambda _: condition(), said)


def change_colors(browser, scheme):
    """Changes the colors of this page and the next ones, by the button."""
    one(browser, "form[data-md-component=palette] label:not([hidden])").click()
    body = f"body[data-md-color-scheme={scheme}]"
    wait(browser, lambda: some(browser, body), f"colors are {scheme}")


def luminance(color):
    """The relative luminance of red, green and blue up to 255, as WCAG defines it."""
    shares = [x / 255 for x in color]
    parts = [
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares
    ]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(one_color, other):
    low, high = sorted(map(luminance, (one_color, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", COLORS)
def test_letters_of_pictures_can_be_read(browser, address, site, scheme):
    """In both colors and widths, by what the script wrote into the pictures."""
    from PIL import Image

    resize(browser, WIDTHS[0])
    browser.get(address)
    if one(browser, "body").get_attribute("data-md-color-scheme") != scheme:
        change_colors(browser, scheme)
    seen, problems = set(), []
    for width in WIDTHS:
        resize(browser, width)
        for page in DRAWN:
            browser.get(address + page)
            for path, shown, background in browser.execute_script(PICTURES):
                if not path.endswith(".png"):
                    continue
                with Image.open(site / path) as image:
                    said = image.info
                if "Letters" not in said:
                    continue
                seen.add(path)
                page_color = [int(x) for x in re.findall(r"\d+", background)[:3]]
                contrasts = [
                    contrast(bytes.fromhex(color[1:]), page_color)
                    for color in said["Colors"].split()
                ]
                size, least = float(said["Letters"]) * shown, min(contrasts, default=21)
                if size < LEAST or least < 4.5 or COLORS[scheme] not in path:
                    problems.append((width, page, path, round(size, 1), least))
    assert not problems, problems
    narrow = {path for path in seen if "_narrow_" in path}
    assert len(narrow) >= 7 and len(seen - narrow) >= 12, seen


def test_every_page_opens_whole_and_fits(browser, address, kinds):
    """No error, no broken image, no sidewards scrolling, no broken word in a table.

    Wide pages are light and narrow ones dark, with letters of a size that can be read.
    """
    problems = []
    browser.get_log("browser")
    for width, scheme in zip(WIDTHS, COLORS, strict=True):
        resize(browser, WIDTHS[0])
        browser.get(address)
        if one(browser, "body").get_attribute("data-md-color-scheme") != scheme:
            change_colors(browser, scheme)
        resize(browser, width)
        for page in kinds:
            browser.get(address + page)
            errors = [x["message"] for x in browser.get_log("browser")]
            broken = browser.execute_script(
                "return [...document.images].filter(x => !(x.complete && "
                "x.naturalWidth)).map(x => x.src)"
            )
            wide = browser.execute_script(
                "const page = document.documentElement;"
                "return page.scrollWidth > innerWidth ? page.scrollWidth : 0"
            )
            words = browser.execute_script(BROKEN_WORDS)
            small = browser.execute_script(SMALL_LETTERS, LEAST)
            if errors or broken or wide or words or small:
                problems.append((width, page, errors, broken, wide, words, small))
    assert not problems, problems


def test_a_page_of_the_reference_is_short(browser, address, site, pages):
    resize(browser, WIDTHS[0])
    reference = [page for page in pages if page.startswith("api/")]
    assert len(reference) > len(test_site.NAMES)
    reference.sort(key=lambda page: (site / page / "index.html").stat().st_size)
    for page in reference[-20:]:
        browser.get(address + page)
        height = "return document.documentElement.scrollHeight"
        assert browser.execute_script(height) <= 4000, page


def test_no_link_is_broken(site, pages):
    from bs4 import BeautifulSoup

    parsed = {
        page: BeautifulSoup((site / page / "index.html").read_text(), "html.parser")
        for page in pages
    }
    ids = {
        page: {x["id"] for x in soup.select("[id]")} for page, soup in parsed.items()
    }
    broken, links = [], 0
    for page, soup in parsed.items():
        for link in soup.select("a[href], img[src], link[href], script[src]"):
            target = link.get("href") or link["src"]
            parts = urllib.parse.urlsplit(
                urllib.parse.urljoin(f"http://site/{page}", target)
            )
            if parts.netloc != "site":
                continue
            links += 1
            path = urllib.parse.unquote(parts.path).lstrip("/")
            there = (
                site / path / ("index.html" if path.endswith("/") or not path else "")
            )
            named = parts.fragment and path in ids
            if not there.is_file() or (named and parts.fragment not in ids[path]):
                broken.append((page, target))
    assert links > 500 and not broken, (links, broken)


@pytest.mark.parametrize(("scheme", "width"), [("default", 1400), ("slate", 390)])
def test_pages_can_be_read_by_all(browser, address, kinds, scheme, width):
    """Axe checks contrast, headings, texts of images and links, in both schemes."""
    resize(browser, WIDTHS[0])
    axe, problems = AXE.read_text(encoding="utf-8"), []
    browser.get(address)
    if one(browser, "body").get_attribute("data-md-color-scheme") != scheme:
        change_colors(browser, scheme)
    resize(browser, width)
    # What is dark is the same everywhere: one page of each kind.
    for page in kinds if scheme == "default" else DARK:
        browser.get(address + page)
        assert one(browser, "body").get_attribute("data-md-color-scheme") == scheme
        # Chromium gives the text of a closed fold a place, over what follows the fold:
        # axe would compare its color with the background of the footer.
        browser.execute_script(
            "document.querySelectorAll('details').forEach(x => { x.open = true })"
        )
        browser.execute_script(axe)
        found = browser.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {runOnly: arguments[0], resultTypes: ['violations']})"
            ".then(x => done(x.violations.map(v => [v.id, v.nodes.length,"
            " v.nodes[0].html, v.nodes[0].failureSummary])))",
            RULES,
        )
        problems += [(page, *violation) for violation in found]
        if scheme == "slate":
            white = browser.execute_script(WHITE)
            white = [image for image in white if not image.endswith(PHOTOGRAPHS)]
            problems += [(page, image) for image in white]
    assert not problems, problems


@pytest.mark.skipif(not SCREENSHOTS, reason="SCREENSHOTS names no folder")
@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_first_screens_are_kept(browser, address, scheme):
    from PIL import Image

    folder = pathlib.Path(SCREENSHOTS)
    folder.mkdir(parents=True, exist_ok=True)
    resize(browser, WIDTHS[0])
    browser.get(address)
    if one(browser, "body").get_attribute("data-md-color-scheme") != scheme:
        change_colors(browser, scheme)
    for width in WIDTHS:
        resize(browser, width, 900)
        for page, name in SHOWN.items():
            browser.get(address + page)
            path = folder / f"{name}_{width}_{COLORS[scheme]}.webp"
            image = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
            image.convert("RGB").save(path, quality=60, method=6)
            assert image.size == (width, 900)


def test_search_finds_what_one_looks_for(browser, address):
    """Terms of newcomers find the right page first; names and other terms find it."""
    resize(browser, WIDTHS[0])
    browser.get(address)
    field = one(browser, "input.md-search__input")
    first = ".md-search-result__item:first-child > .md-search-result__link"
    wanted = [(term, page, first) for term, page in FIRST.items()]
    wanted += [(term, page, ".md-search-result__link") for term, page in TERMS.items()]
    for term, page, link in wanted:
        field.clear()
        field.send_keys(term)
        link = f"{link}[href^='{address}{page}']"
        wait(browser, lambda link=link: some(browser, link), f"{term} finds {page}")


@pytest.mark.parametrize("page", OUTPUTS)
def test_notebook_shows_its_outputs(browser, address, page):
    browser.get(f"{address}tutorial/{page}/")
    said, figures = OUTPUTS[page]
    article = one(browser, "article")
    assert re.search(said, article.text)
    assert "Traceback" not in article.text
    assert len(some(article, "img")) == figures
    assert some(browser, ".md-footer__link--prev")
    assert some(browser, ".md-footer__link--next")


def test_figures_grow_and_colors_change(browser, address):
    resize(browser, WIDTHS[0])
    browser.get(f"{address}research/paper/")
    image = one(browser, "article a.glightbox img")
    before = image.size["width"]
    browser.execute_script("arguments[0].click()", image)
    wait(browser, lambda: some(browser, ".gslide.loaded img"), "a figure opens")
    grown = one(browser, ".gslide.loaded img")
    wait(browser, lambda: grown.size["width"] > before, "a figure grows")
    browser.get(address)
    first = one(browser, "body").get_attribute("data-md-color-scheme")
    change_colors(browser, "slate" if first == "default" else "default")
