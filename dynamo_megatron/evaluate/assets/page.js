"use strict";
// Everything a model wrote reaches the page through textContent, never as markup.
(function () {
  const PER_PAGE = 50;
  const samples = JSON.parse(document.getElementById("samples").textContent);
  const byId = (id) => document.getElementById(id);
  const list = byId("list"), search = byId("search"), source = byId("source");
  const haystack = samples.map((s) =>
    [s.problem, s.response, s.answer, s.extracted, s.label, s.id].join("\n").toLowerCase());
  let page = 0;

  const sources = [...new Set(samples.map((s) => s.source))];

  // Control, direction and invisible characters and lone surrogates are spelt out: what is read is
  // what was written.
  const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\u2028\u2029]/gu;
  const spelt = (c) => c === "\n" || c === "\t" ? c : "\\u{" + c.codePointAt(0).toString(16) + "}";

  function element(tag, className, text) {
    const node = document.createElement(tag);
    node.className = className;
    node.textContent = String(text).replace(HIDDEN, spelt);
    return node;
  }

  sources.forEach((name, place) => {
    const option = element("option", "", name);
    option.value = place;
    source.append(option);
  });

  function card(s) {
    const node = element("article", s.outcome, "");
    const facts = element("div", "facts", "");
    const say = (text, name) => facts.append(element("span", name || "", text));
    say(s.outcome, "verdict");
    say("answer " + (s.extracted || "none") + ", expected " + s.answer);
    if (s.status !== "ok") say("verification: " + s.status + " " + s.message);
    say(s.source + (s.label ? " " + s.label : ""));
    say("sample " + s.k + " of " + s.id);
    say(s.tokens + " tokens" + (s.truncated ? ", truncated" : ""));
    node.append(facts, element("pre", "problem", s.problem), element("pre", "", s.response));
    return node;
  }

  function show() {
    const outcome = document.querySelector("input[name=outcome]:checked").value;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (s, i) => (!source.value || s.source === sources[source.value])
      && (!byId("truncated").checked || s.truncated)
      && words.every((word) => haystack[i].includes(word));
    const found = samples.filter(fits);
    const chosen = found.filter((s) => !outcome || s.outcome === outcome);
    byId("n-all").textContent = found.length;
    for (const name of ["wrong", "right", "error"]) {
      byId("n-" + name).textContent = found.filter((s) => s.outcome === name).length;
    }
    const pages = Math.max(1, Math.ceil(chosen.length / PER_PAGE));
    page = Math.min(page, pages - 1);
    byId("count").textContent = chosen.length + " shown";
    byId("place").textContent = "page " + (page + 1) + " of " + pages;
    byId("previous").disabled = page === 0;
    byId("next").disabled = page === pages - 1;
    list.replaceChildren(...chosen.slice(page * PER_PAGE, (page + 1) * PER_PAGE).map(card));
  }

  function turn(by) {
    page += by;
    show();
    list.scrollIntoView();
  }

  function restart() {
    page = 0;
    show();
  }

  for (const node of document.querySelectorAll("input, select")) node.addEventListener("input", restart);
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  show();
})();
