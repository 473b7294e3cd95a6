"use strict";
(() => {
  const boxes = [...document.querySelectorAll("[data-toggle]")];

  function show() {
    for (const box of boxes)
      for (const item of document.querySelectorAll(`[data-group="${box.dataset.toggle}"]`))
        item.classList.toggle("off", !box.checked);
    const count = boxes.filter((box) => box.checked).length;
    document.getElementById("toggle-status").textContent = `${count} of ${boxes.length} conditions shown`;
  }

  function setAll(checked) {
    boxes.forEach((box) => (box.checked = checked));
    show();
  }

  boxes.forEach((box) => box.addEventListener("change", show));
  document.getElementById("show-all")?.addEventListener("click", () => setAll(true));
  document.getElementById("show-none")?.addEventListener("click", () => setAll(false));
})();
