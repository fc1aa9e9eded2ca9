"""The page shows what was written, and executes none of it."""

import base64
import hashlib
import json
import re
import shutil
import subprocess

import pytest

from dynamo_megatron.evaluate.page import write_page
from dynamo_megatron.evaluate.plots import draw
from dynamo_megatron.evaluate.summary import summarise

from .builders import problem, sample

EVIL = (
    "</script><script>document.title='HACKED'</script><img src=x onerror=\"document.title="
    "'HACKED'\"><!-- <b>bold</b> &amp; \u2028 \u202e \ud800 $x<y$ ${1} `x`"
)


@pytest.fixture
def page(tmp_path):
    samples = [
        sample("wrong", id="a", response=EVIL, problem=EVIL, answer=EVIL, source=EVIL, label=EVIL),
        *problem("rwe", id="b", source="plain"),
    ]
    summaries = summarise(samples)
    path = tmp_path / "index.html"
    write_page(
        path,
        title=EVIL,
        settings={"append": EVIL},
        summaries=summaries,
        samples=samples,
        plots=draw(summaries, samples, tmp_path / "plots"),
    )
    return path


def data_of(text: str):
    (block,) = re.findall(r'<script type="application/json" id="samples">(.*?)</script>', text)
    return json.loads(block)


def test_no_text_of_a_sample_reaches_the_page_as_markup(page):
    text = page.read_text(encoding="utf-8")
    assert "<script>document" not in text
    assert "<img src=x" not in text
    assert len(re.findall("<script", text)) == 2
    block = text.partition('id="samples">')[2].partition("</script>")[0]
    assert not set("<>&") & set(block)
    assert data_of(text)[0]["response"] == EVIL


def test_the_page_admits_its_own_script_alone_and_loads_nothing(page):
    text = page.read_text(encoding="utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"(?:src|href)=\"?(?:https?:|//)", text)
    assert "innerHTML" not in script and "insertAdjacent" not in script


def test_every_sample_is_on_the_page_with_its_outcome(page):
    rows = data_of(page.read_text(encoding="utf-8"))
    assert [row["outcome"] for row in rows] == ["wrong", "right", "wrong", "error"]
    assert rows[3]["message"] == "not verified within 1 s"


def test_a_page_of_too_many_samples_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr("dynamo_megatron.evaluate.page.MAX_PAGE_CHARS", 1000)
    samples = problem("r" * 20, id="a")
    path = tmp_path / "index.html"
    write_page(
        path, title="t", settings={}, summaries=summarise(samples), samples=samples, plots=[]
    )
    text = path.read_text(encoding="utf-8")
    shown = len(data_of(text))
    assert 0 < shown < 20
    assert f"The first {shown} samples; {20 - shown} more are in samples.jsonl." in text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to open the page with")
def test_a_browser_shows_the_text_and_runs_none_of_it(page, tmp_path):
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode()
    assert "<title>HACKED" not in dom
    assert len(re.findall("<article", dom)) == 4
    assert "&lt;img src=x onerror=" in dom.rpartition('id="list"')[2]
    assert "\\u{202e} \\u{d800}" in dom  # nothing invisible turns the text around
    assert '<b id="n-error">1</b>' in dom
