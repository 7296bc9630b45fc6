// Tooltips of charts: one for all plots, also for those that are added later. Pages work without it.
(() => {
  const tip = document.createElement("div");
  tip.className = "chart-tip";
  let cursor = null;

  const add = (parent, kind, text, tone) => {
    const element = parent.appendChild(document.createElement(kind));
    element.textContent = text;
    if (tone) element.className = tone;
    return element;
  };

  const hide = () => {
    tip.style.display = "none";
    if (cursor) cursor.style.opacity = "";
    cursor = null;
  };

  const show = (event, title, lines) => {
    tip.replaceChildren();
    add(tip, "b", title);
    for (const line of lines) {
      const row = add(tip, "div", "");
      if (line.length > 1) {
        add(row, "i", "", "chip " + line[1]);
        add(row, "span", line[0]);
        add(row, "em", line[2]);
      } else {
        add(row, "span", line[0]);
      }
    }
    if (!tip.isConnected) document.body.appendChild(tip);
    tip.style.display = "block";
    const right = event.clientX + 16;
    const left = right + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 12 : right;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4)) + "px";
  };

  const parsed = new WeakMap();
  const read = (plot, text) => {
    const known = parsed.get(plot);
    if (known && known.text === text) return known.data;
    const data = JSON.parse(text);
    parsed.set(plot, { text, data });
    return data;
  };

  const showColumn = (event, plot, x) => {
    const columns = read(plot, plot.dataset.tips);
    if (!columns.length) return hide();
    const found = columns.findIndex((column) => x < column[0]);
    const at = found < 0 ? columns.length - 1 : found;
    const [end, title, lines] = columns[at];
    hide();
    cursor = plot.querySelector(".cursor");
    cursor.style.left = 50 * ((at ? columns[at - 1][0] : 0) + end) + "%";
    cursor.style.opacity = ".6";
    show(event, title, lines);
  };

  const showCell = (event, plot, x, y) => {
    const rows = read(plot, plot.dataset.grid);
    const row = rows[Math.min(rows.length - 1, Math.floor(y * rows.length))] || [];
    const cell = row[Math.min(row.length - 1, Math.floor(x * row.length))] || [];
    if (cell.length) show(event, cell[0], [[cell[1]]]);
    else hide();
  };

  const move = (event) => {
    const plot = event.target.closest && event.target.closest("[data-tips], [data-grid]");
    if (!plot) return hide();
    const box = plot.getBoundingClientRect();
    const x = Math.max(0, (event.clientX - box.left) / box.width);
    const y = Math.max(0, (event.clientY - box.top) / box.height);
    if (plot.dataset.tips) showColumn(event, plot, x);
    else showCell(event, plot, x, y);
  };

  document.addEventListener("pointermove", move);
  document.addEventListener("pointerdown", move);
  document.addEventListener("scroll", hide, { passive: true });
  document.documentElement.addEventListener("pointerleave", hide);
})();
