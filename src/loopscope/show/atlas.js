"use strict";
(() => {
  const body = document.querySelector(".matrix tbody");
  const rows = [...body.rows];
  const marks = [...document.querySelectorAll("[data-group]")];
  const figures = document.querySelectorAll("figure[data-setting]");
  const filter = document.getElementById("filter");
  const sort = document.getElementById("sort");
  const turn = document.getElementById("turn");
  let rising = true;

  const chosen = () => document.querySelector('[name="setting"]:checked')?.value;

  // What has no value comes last, whichever way the rest is turned.
  function compare(a, b) {
    const [x, y] = [a, b].map((row) => row.querySelector(`[data-key="${sort.value}"]`)?.dataset.value);
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined) || order(a, b);
    return (rising ? 1 : -1) * (Number(x) - Number(y)) || order(a, b);
  }
  const order = (a, b) => (rising || sort.value ? 1 : -1) * (Number(a.dataset.order) - Number(b.dataset.order));

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = new Set();
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = row.dataset.setting !== chosen() || !words.every((word) => text.includes(word));
      if (!row.hidden) kept.add(row.dataset.anchor);
    }
    marks.forEach((mark) => mark.classList.toggle("off", !kept.has(mark.dataset.group)));
    figures.forEach((figure) => (figure.hidden = figure.dataset.setting !== chosen()));
    body.append(...[...rows].sort(sort.value ? compare : order));
    turn.textContent = rising ? "↓ smallest first" : "↑ largest first";
    for (const head of document.querySelectorAll("[data-column]")) {
      if (head.dataset.column === sort.value) head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    const all = rows.filter((row) => row.dataset.setting === chosen()).length;
    document.getElementById("status").textContent = `${rows.filter((row) => !row.hidden).length} of ${all} designs shown`;
  }

  // Evidence is folded; whoever follows a link to it finds it open.
  function open() {
    const target = location.hash ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
    for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
    target?.scrollIntoView();
  }

  document.querySelectorAll('[name="setting"]').forEach((radio) => radio.addEventListener("change", show));
  filter.addEventListener("input", show);
  sort.addEventListener("change", show);
  turn.addEventListener("click", () => {
    rising = !rising;
    show();
  });
  document.querySelectorAll("[data-sort]").forEach((button) =>
    button.addEventListener("click", () => {
      rising = sort.value === button.dataset.sort ? !rising : true;
      sort.value = button.dataset.sort;
      show();
    }),
  );
  document.querySelectorAll(".matrix .setting").forEach((each) => (each.hidden = true)); // one is shown, and it is picked
  addEventListener("hashchange", open);
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#"]');
    if (link && link.getAttribute("href") === location.hash) open(); // the same link again: no change of the address
  });
  show();
  open();
})();
