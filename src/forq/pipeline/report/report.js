// Tooltips for the charts, and the switch between light and dark. The page works without it.
(() => {
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";

  const add = (parent, kind, text, tone) => {
    const element = parent.appendChild(document.createElement(kind));
    element.textContent = text;
    if (tone) element.className = tone;
    return element;
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
    tip.style.display = "block";
    const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 12 : event.clientX + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4)) + "px";
  };

  const follow = (plot, move) => {
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      move(event, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    });
    plot.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  };

  for (const plot of document.querySelectorAll("[data-tips]")) {
    const columns = JSON.parse(plot.dataset.tips);
    const cursor = plot.querySelector(".cursor");
    follow(plot, (event, x) => {
      const at = Math.max(0, columns.findIndex((column) => x < column[0]));
      if (!columns.length) return;
      const [end, title, lines] = columns[at];
      cursor.style.left = 50 * ((at ? columns[at - 1][0] : 0) + end) + "%";
      show(event, title, lines);
    });
  }

  for (const plot of document.querySelectorAll("[data-grid]")) {
    const rows = JSON.parse(plot.dataset.grid);
    follow(plot, (event, x, y) => {
      const row = rows[Math.min(rows.length - 1, Math.floor(y * rows.length))] || [];
      const cell = row[Math.min(row.length - 1, Math.floor(x * row.length))] || [];
      if (cell.length) show(event, cell[0], [[cell[1]]]);
      else tip.style.display = "none";
    });
  }

  const root = document.documentElement;
  const keep = (scheme) => { try { localStorage.setItem("forq-scheme", scheme); } catch { /* local files may have no storage */ } };
  try { root.dataset.scheme = localStorage.getItem("forq-scheme") || ""; } catch { /* the same */ }
  document.getElementById("scheme").addEventListener("click", () => {
    const dark = root.dataset.scheme ? root.dataset.scheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.scheme = dark ? "light" : "dark";
    keep(root.dataset.scheme);
  });
})();
