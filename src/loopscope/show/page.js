"use strict";
(() => {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const root = document.documentElement;
  const hidden = new Set();
  const drawn = new Set();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const NARROW = 520;
  const PAPER_WIDTH = 660;

  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const printing = () => root.classList.contains("printing");

  // Colours come from the style sheet, so that light, dark and paper are decided in one place.
  function trace(given) {
    const colour = style(`--c${page.groups[given.group]}`);
    const { group, ...rest } = given;
    const edge = { color: style("--paper"), width: 0, ...rest.marker.line }; // keeps neighbouring marks apart
    return {
      ...rest,
      visible: !hidden.has(group),
      showlegend: false,
      line: { ...rest.line, color: colour },
      marker: { ...rest.marker, color: colour, line: edge },
    };
  }

  function axis(given, narrow) {
    const font = { size: narrow ? 12 : 13 };
    const powers = given.exponentformat === "power"; // plotly writes these a quarter larger
    return {
      ...given,
      title: { text: given.title.text.replace(/_(\w)/g, "<sub>$1</sub>"), font, standoff: 8 }, // our own words
      automargin: true,
      gridcolor: style("--grid"),
      linecolor: style("--rule"),
      zeroline: false,
      showline: true,
      ticks: "outside",
      ticklen: 4,
      tickcolor: style("--rule"),
      tickfont: { size: powers ? font.size / 1.25 : font.size },
    };
  }

  function layout(given, width) {
    const narrow = width < NARROW;
    const ink = style("--ink");
    const outside = (anchor) => given.annotations.some((label) => label.yanchor === anchor); // labels beside the frame
    const size = printing() ? { width: PAPER_WIDTH } : {};
    return {
      ...size,
      autosize: !printing(),
      height: printing() ? 290 : narrow ? 320 : 400,
      margin: { l: 48, r: outside("middle") ? 58 : 14, t: outside("bottom") ? 24 : 14, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: "system-ui, sans-serif", size: 13 },
      hovermode: "closest",
      hoverlabel: { bgcolor: style("--card"), bordercolor: style("--rule"), font: { color: ink }, align: "left" },
      dragmode: coarse.matches ? false : "zoom",
      xaxis: axis(given.xaxis, narrow),
      yaxis: axis(given.yaxis, narrow),
      shapes: given.shapes.map((shape) => ({ ...shape, line: { color: style("--muted"), width: 1, dash: "dot" } })),
      annotations: given.annotations.map((label) => ({
        ...label,
        font: { color: style("--muted"), size: 12 },
      })),
    };
  }

  function draw(element) {
    const chart = page.charts[element.dataset.chart];
    const figure = [chart.traces.map(trace), layout(chart.layout, element.clientWidth)];
    drawn.add(element);
    return Plotly.react(element, ...figure, { displayModeBar: false, responsive: true }).then(() => {
      element.dataset.drawn = "true";
    });
  }

  const everything = () => [...document.querySelectorAll("[data-chart]")];
  const redraw = () => drawn.forEach(draw);

  // Charts are drawn when they come near; paper gets all of them, in light colours and at its own width.
  function paper(on) {
    if (on === printing()) return;
    root.classList.toggle("printing", on);
    everything().forEach(draw);
  }

  function toggled() {
    const boxes = [...document.querySelectorAll("[data-toggle]")];
    hidden.clear();
    boxes.filter((box) => !box.checked).forEach((box) => hidden.add(Number(box.dataset.toggle)));
    document.querySelectorAll("[data-group]").forEach((item) => {
      item.classList.toggle("off", hidden.has(Number(item.dataset.group)));
    });
    const status = document.getElementById("toggle-status");
    status.textContent = `${boxes.length - hidden.size} of ${boxes.length} conditions shown`;
    redraw();
  }

  function setAll(checked) {
    document.querySelectorAll("[data-toggle]").forEach((box) => (box.checked = checked));
    toggled();
  }

  document.querySelectorAll("[data-toggle]").forEach((box) => box.addEventListener("change", toggled));
  document.getElementById("show-all")?.addEventListener("click", () => setAll(true));
  document.getElementById("show-none")?.addEventListener("click", () => setAll(false));
  dark.addEventListener("change", redraw);
  addEventListener("beforeprint", () => paper(true));
  addEventListener("afterprint", () => paper(false));
  matchMedia("print").addEventListener("change", (event) => paper(event.matches));

  const near = new IntersectionObserver(
    (entries) =>
      entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
        near.unobserve(entry.target);
        draw(entry.target);
      }),
    { rootMargin: "400px" },
  );
  everything().forEach((element) => near.observe(element));
})();
