"""One HTML file to read an evaluation in: nothing is loaded, nothing a model wrote is executed.

The samples stand in the page as JSON with every ``<`` escaped, and the script puts them in place
with ``textContent``; a content security policy admits that script alone, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo_megatron.algo.passk import Interval
from dynamo_megatron.evaluate.samples import RIGHT_FROM, Sample
from dynamo_megatron.evaluate.summary import Summary

MAX_PAGE_CHARS = 48 << 20
"""Text of samples on a page; a browser would choke on more. The JSON lines have all of it."""

_ASSETS = Path(__file__).parent / "assets"


def write_page(
    path: Path,
    *,
    title: str,
    settings: Mapping[str, object],
    summaries: Sequence[Summary],
    samples: Sequence[Sample],
    plots: Sequence[Path],
    right_from: float = RIGHT_FROM,
) -> None:
    """Write the page.

    Args:
        path: the file.
        title: what was evaluated.
        settings: shown under the title.
        summaries: the table.
        samples: to read; of very many the first.
        plots: PNG files to show, in order.
        right_from: reward from which a sample is right.
    """
    script = (_ASSETS / "page.js").read_text(encoding="utf-8")
    style = (_ASSETS / "page.css").read_text(encoding="utf-8")
    data, shown = _samples_json(samples, right_from)
    left_out = len(samples) - shown
    note = f"The first {shown} samples; {left_out} more are in samples.jsonl." if left_out else ""
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; "
    policy += f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{style}</style></head><body>",
        f"<header><h1>{html.escape(title)}</h1>{_settings(settings)}</header>",
        f"<main>{_table(summaries)}",
        f'<div class="plots">{"".join(_image(plot) for plot in plots)}</div>',
        _CONTROLS,
        f'<p class="note">{html.escape(note)}</p><div id="list"></div>',
        '<nav><button id="previous">Previous</button><span id="place"></span>'
        '<button id="next">Next</button></nav></main>',
        f'<script type="application/json" id="samples">{data}</script>',
        f"<script>{script}</script></body></html>",
    ]
    text = "\n".join(parts)
    # A lone surrogate in a problem's text has no UTF-8.
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


_CONTROLS = """<div class="controls" role="search">
<span class="filters">
<label><input type="radio" name="outcome" value="" checked> all <b id="n-all"></b></label>
<label><input type="radio" name="outcome" value="wrong"> wrong <b id="n-wrong"></b></label>
<label><input type="radio" name="outcome" value="right"> right <b id="n-right"></b></label>
<label><input type="radio" name="outcome" value="error"> error <b id="n-error"></b></label>
</span>
<label>source <select id="source"><option value="">all</option></select></label>
<label><input type="checkbox" id="truncated"> truncated only</label>
<input type="search" id="search" placeholder="search problem, response, answer" aria-label="search">
<span id="count"></span>
</div>"""


def _samples_json(samples: Sequence[Sample], right_from: float) -> tuple[str, int]:
    """The samples as JSON that cannot end the script element, and how many there are."""
    items: list[str] = []
    total = 0
    for sample in samples:
        item = json.dumps(
            {
                "id": sample.id,
                "k": sample.k,
                "source": sample.source,
                "label": sample.label,
                "problem": sample.problem,
                "answer": sample.answer,
                "response": sample.response,
                "extracted": sample.extracted,
                "outcome": sample.outcome(right_from),
                "reward": sample.reward,
                "status": sample.status,
                "message": sample.message,
                "truncated": sample.truncated,
                "tokens": sample.num_tokens,
            }
        )
        total += len(item)
        if total > MAX_PAGE_CHARS and items:
            break
        items.append(item)
    text = f"[{','.join(items)}]"
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text, len(items)


def _settings(settings: Mapping[str, object]) -> str:
    shown = "".join(
        f"<span><i>{html.escape(name)}</i> {html.escape(str(value))}</span>"
        for name, value in settings.items()
    )
    return f'<p class="settings">{shown}</p>'


def _table(summaries: Sequence[Summary]) -> str:
    ks = sorted({k for summary in summaries for k in summary.pass_at_k})
    head = [
        "source",
        "problems",
        "samples",
        "pass@1",
        *[f"pass@{k}" for k in ks],
        f"maj@{ks[-1] if ks else 1}",
    ]
    head += ["tokens", "truncated", "formatted", "errors"]
    rows = []
    for s in summaries:
        cells = [html.escape(s.source), str(s.num_problems), str(s.num_samples), _rate(s.pass_at_1)]
        cells += [_rate(s.pass_at_k.get(k)) for k in ks] + [_rate(s.maj_at_k)]
        cells += [f"{s.mean_tokens:.0f}", f"{s.truncation_rate:.1%}", f"{s.format_rate:.1%}"]
        rows.append("".join(f"<td>{cell}</td>" for cell in [*cells, str(s.errors)]))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    titles = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{titles}</tr>{body}</table></div>'


def _rate(interval: Interval | None) -> str:
    if interval is None:
        return "\u2013"
    bounds = f"{100 * interval.low:.1f}\u2013{100 * interval.high:.1f}"
    return f"{interval.mean:.1%} <small>{bounds}</small>"


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    alt = html.escape(path.stem.replace("_", " "))
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">'


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
