"""The report in a real browser, Debian's Chromium: what it shows, how it fits, who can use it."""

import shutil
import statistics
from pathlib import Path

import pytest
from conftest import invented

from cosformer import report
from cosformer.results import Cost, Quality, of

pytest.importorskip("matplotlib")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed (the dev extra has it)"
)
axe = pytest.importorskip(
    "axe_playwright_python.base", reason="axe-playwright-python is not installed (the dev extra has it)"
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium; on Debian, apt-get install chromium"
)

WIDTHS = (360, 390, 1280)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as drive:
        # Containers give no user namespaces to root; the page is ours.
        running = drive.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write_page(invented(), path)
    return path


@pytest.fixture
def visit(browser, file):
    """Opens a report; in the end there must have been no error and no request but for the file itself."""
    pages, wrong = [], []

    def go(width: int = 1280, scheme: str = "light", file: Path = file):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        url = file.as_uri()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
        page.on(
            "request",
            lambda r: (
                wrong.append(f"request: {r.url}") if r.url != url and not r.url.startswith("data:") else None
            ),
        )
        page.goto(url)
        pages.append(page)
        return page

    yield go
    for page in pages:
        page.close()
    assert wrong == []


def test_the_page_never_scrolls_sideways(visit):
    page = visit()
    for opened in (False, True):
        if opened:
            page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{wide} px at {width}, details {'open' if opened else 'closed'}"
            cut = page.evaluate(
                """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, pre, svg') &&
                   e.getBoundingClientRect().right > innerWidth + 1 && e.checkVisibility())
                   .map(e => e.outerHTML.slice(0, 80))"""
            )
            assert cut == []


def test_a_wide_table_scrolls_by_itself_and_says_so(visit):
    page = visit(360)
    region = page.locator("#lm .scroll").first
    hint = region.locator(".hint")
    assert region.evaluate("e => e.scrollWidth > e.clientWidth")
    assert hint.evaluate("e => e.getBoundingClientRect().height") > 10
    region.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('#lm .scroll').scrollLeft > 0")
    page.set_viewport_size({"width": 1280, "height": 900})
    fits = page.locator("#exactness .scroll .hint")
    assert fits.evaluate("e => e.getBoundingClientRect().height") < 1


def cells(page, caption: str) -> dict[str, list[str]]:
    """The rows of the table with this caption, as the reader sees them."""
    table = page.locator("table").filter(has=page.locator("caption", has_text=caption)).first
    found = table.evaluate(
        "t => [...t.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    return {head: rest for head, *rest in found if rest}


NAMES = {"cosformer": "cosFormer", "cosformer-paper": "cosFormer (paper)", "softmax+rope": "softmax + RoPE"}


def test_the_tables_say_what_the_rows_say(visit):
    """Recomputed here, without the report's code."""
    rows, page = invented(), visit()
    shown = cells(page, "WikiText-2 language model")
    lengths = sorted({row.length for row in of(rows, Cost)})
    costs = cells(page, "Training a whole model")
    for mixer, name in NAMES.items():
        mine = [row for row in of(rows, Quality) if row.mixer == mixer and row.group == "lm"]
        values = [row.value for row in mine]
        assert shown[name][0] == f"{statistics.fmean(values):.2f} {min(values):.2f}–{max(values):.2f}"
        assert shown[name][3:8] == ["0.001", "1.843 M", "1.638 M", "400", "95.2"]
        ms = {row.length: row.ms for row in of(rows, Cost) if row.mixer == mixer and row.work == "training"}
        seen = [float(text.split()[0].replace(",", "")) for text in costs[name][: len(lengths)]]
        assert seen == pytest.approx([ms[n] for n in lengths], rel=0.006)


def test_bold_is_best(visit):
    page = visit()
    shown = page.evaluate(
        """[...document.querySelector('#lm table').tBodies[0].rows]
           .map(r => [r.cells[1].innerText, !!r.cells[1].querySelector('strong')])"""
    )
    least = min(float(text.split(" ")[0]) for text, _ in shown)
    assert [bold for _, bold in shown] == [float(text.split(" ")[0]) == least for text, _ in shown]


def test_everything_is_reached_by_tab_and_shows_it(visit):
    page = visit()
    wanted = page.evaluate(
        """(() => { const stops = document.querySelectorAll('a[href], summary, [tabindex="0"]');
           const all = [...stops].filter(e => e.checkVisibility());
           all.forEach((e, i) => e.dataset.stop = i); return all.length; })()"""
    )
    reached = []
    for _ in range(wanted):
        page.keyboard.press("Tab")
        stop, outline = page.evaluate(
            """(() => { const e = document.activeElement, s = getComputedStyle(e);
               return [e.dataset.stop, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2]; })()"""
        )
        assert outline, f"stop {stop} does not show that it has the focus"
        reached.append(int(stop))
    assert reached == list(range(wanted))
    assert wanted > 20


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(visit, scheme, width):
    page = visit(width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((d, i) => d.open = i % 3 == 0)")
    page.evaluate(axe.AXE_SCRIPT)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert [
        (v["id"], v["nodes"][0]["html"][:120], v["nodes"][0].get("failureSummary", "")) for v in found
    ] == []


def test_figures_follow_the_theme(visit):
    colours = set()
    for scheme in ("light", "dark"):
        page = visit(scheme=scheme)
        line, text, ground = page.evaluate(
            """[getComputedStyle(document.querySelector('.plot .c0 .line')).stroke,
                getComputedStyle(document.querySelector('.plot text')).fill,
                getComputedStyle(document.body).backgroundColor]"""
        )
        colours |= {line, text, ground}
    assert len(colours) == 6


def test_it_prints(visit):
    page = visit(scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.set_viewport_size({"width": 690, "height": 1000})  # A4 less its margins
    cut = page.evaluate(
        """[...document.querySelectorAll('.scroll')].filter(e => e.checkVisibility() &&
           e.querySelector('table').scrollWidth > innerWidth).map(e => e.ariaLabel)"""
    )
    assert cut == []
    page.emulate_media(media=None)
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") > 5
