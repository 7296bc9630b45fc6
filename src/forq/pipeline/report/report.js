// The switch between light and dark. The page works without it.
(() => {
  const root = document.documentElement;
  const keep = (theme) => { try { localStorage.setItem("forq-theme", theme); } catch { /* local files may have no storage */ } };
  try { root.dataset.theme = localStorage.getItem("forq-theme") || ""; } catch { /* the same */ }
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    keep(root.dataset.theme);
  });
})();
