// Live updates, keyboard, selection and theme. Every page works without it.
"use strict";

(() => {
  const $ = (id) => document.getElementById(id);
  const live = $("live");
  const banner = $("problem");
  const tools = document.querySelector(".tools");
  tools.hidden = false;

  // ---- Live updates: server-sent events with the new HTML of #live.

  let source = null;
  let paused = false;
  let waiting = null;
  // Until the next attempt to connect, in milliseconds.
  const SHORTEST_PATIENCE = 2000;
  const LONGEST_PATIENCE = 60000;
  let patience = SHORTEST_PATIENCE;
  let again = 0;
  const OFFLINE_AFTER = 3500;
  let silence = 0;
  const livePath = document.body.dataset.live;

  // What the user is doing must not be torn away: a field or button in focus, selected text; a link or button that is
  // replaced between press and release would not be clicked.
  let pressed = false;
  function busy() {
    if (pressed) return true;
    const active = document.activeElement;
    if (active && live.contains(active) && active.matches("input, select, textarea, button")) return true;
    const selection = getSelection();
    return Boolean(selection && !selection.isCollapsed && live.contains(selection.anchorNode));
  }

  // How to find an element again in new HTML: its id, or what it is and where it leads.
  function trace(element) {
    if (element === live || !live.contains(element)) return null;
    if (element.id) return (each) => each.id === element.id;
    const row = element.closest("[data-key]")?.dataset.key;
    const [tag, href, label] = [element.tagName, element.getAttribute("href"), element.getAttribute("aria-label")];
    const text = label ? "" : element.textContent;
    return (each) => each.tagName === tag && each.getAttribute("href") === href
      && each.getAttribute("aria-label") === label && (label ? "" : each.textContent) === text
      && each.closest("[data-key]")?.dataset.key === row;
  }

  function show(html) {
    const open = new Set([...live.querySelectorAll("details[open]")].map((each) => each.id));
    const typed = [...live.querySelectorAll("input[id]")].filter((each) => each.value !== each.defaultValue);
    const isFocused = trace(document.activeElement);
    const current = live.querySelector("tr.current")?.dataset.key;
    const scrolled = [...live.querySelectorAll(".scroll, .log")].map((each) => [each.scrollLeft, each.scrollTop,
      each.scrollTop + each.clientHeight >= each.scrollHeight - 4]);
    const parsed = new DOMParser().parseFromString(html, "text/html");
    live.replaceChildren(...parsed.body.childNodes);
    for (const id of open) if (id && $(id)) $(id).open = true;
    for (const { id, value } of typed) if ($(id)) $(id).value = value;
    live.querySelectorAll(".scroll, .log").forEach((each, number) => {
      const [left, top, atEnd] = scrolled[number] ?? [0, 0, true];
      each.scrollLeft = left;
      each.scrollTop = atEnd && each.matches(".log") ? each.scrollHeight : top;
    });
    if (current !== undefined) mark(rows().find((row) => row.dataset.key === current), false);
    if (isFocused) {
      [...live.querySelectorAll("a, summary, [tabindex]")].find(isFocused)?.focus({ preventScroll: true });
    }
  }

  function update(html) {
    banner.hidden = true;
    waiting = busy() ? html : null;
    if (waiting === null) show(html);
  }

  function showWaiting() {
    if (waiting !== null && !busy()) { show(waiting); waiting = null; }
  }

  document.addEventListener("focusout", () => setTimeout(showWaiting, 0));
  document.addEventListener("selectionchange", showWaiting);
  addEventListener("pointerdown", () => { pressed = true; }, true);
  // A menu or a drag takes the release away.
  for (const name of ["pointerup", "pointercancel", "contextmenu", "dragend"]) {
    // The click comes after the release.
    addEventListener(name, () => { pressed = false; setTimeout(showWaiting, 0); }, true);
  }

  function problem(text) {
    banner.textContent = text;
    banner.hidden = false;
  }

  function status(text) {
    const state = $("live-state");
    if (state) state.textContent = text;
    $("pause")?.setAttribute("aria-pressed", String(paused));
    $("pause")?.classList.toggle("off", text !== "live");
  }

  function connect() {
    if (!livePath || paused || document.hidden || source) return;
    source = new EventSource(livePath);
    source.addEventListener("update", (event) => { status("live"); update(event.data); });
    source.addEventListener("problem", (event) => { status("live"); problem(event.data); });
    source.onopen = () => { clearTimeout(silence); status("live"); patience = SHORTEST_PATIENCE; };
    source.onerror = () => {
      // Streams end after some minutes, and the browser connects again at once.
      clearTimeout(silence);
      silence = setTimeout(() => status("offline"), OFFLINE_AFTER);
      // After an answer such as 503 the browser does not try again by itself.
      if (source && source.readyState === EventSource.CLOSED) {
        source = null;
        problem("Live updates are interrupted; trying again. Reload the page to see why.");
        again = setTimeout(connect, patience);
        patience = Math.min(2 * patience, LONGEST_PATIENCE);
      }
    };
  }

  function disconnect() {
    clearTimeout(again);
    clearTimeout(silence);
    source?.close();
    source = null;
  }

  function togglePause() {
    paused = !paused;
    if (paused) { disconnect(); status("paused"); } else { status("live"); connect(); }
  }

  $("pause")?.addEventListener("click", togglePause);
  // A hidden tab asks for nothing.
  document.addEventListener("visibilitychange", () => document.hidden ? disconnect() : connect());
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", connect);
  connect();

  // ---- Selection.

  const all = $("all");
  if (all) {
    const boxes = () => [...document.querySelectorAll('input[name="id"][type="checkbox"]')];
    all.hidden = false;
    all.addEventListener("change", () => boxes().forEach((box) => { box.checked = all.checked; }));
    document.addEventListener("change", (event) => {
      if (!event.target.matches('input[name="id"]')) return;
      const checked = boxes().filter((box) => box.checked).length;
      all.checked = checked === boxes().length;
      all.indeterminate = checked > 0 && !all.checked;
      const selected = document.querySelector('input[name="which"][value="selected"]');
      if (selected && checked) selected.checked = true;
    });
  }

  // ---- Theme.

  function toggleTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("forq-theme", root.dataset.theme); } catch { /* storage is off */ }
  }

  $("theme").addEventListener("click", toggleTheme);
  $("help").addEventListener("click", () => $("keys").showModal());

  // ---- Keyboard.

  const rows = () => [...document.querySelectorAll("table.rows tbody tr")];

  function mark(row, scroll = true) {
    rows().forEach((each) => each.classList.toggle("current", each === row));
    if (row && scroll) row.scrollIntoView({ block: "nearest" });
  }

  function move(step) {
    const found = rows();
    const at = found.findIndex((row) => row.classList.contains("current"));
    mark(found[Math.max(0, Math.min(found.length - 1, at + step))] ?? found[0]);
  }

  function find() {
    const field = document.querySelector("main form.filter input:not([type=hidden])") ?? $("find-job");
    field?.focus();
    field?.select();
  }

  const root = new URL(document.querySelector(".brand").href).pathname;
  const go = { o: "", d: "dead", s: "schedules", p: "processes" };
  let leader = false;

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if ($("keys").open) return;
    const current = document.querySelector("tr.current");
    const key = event.key;
    const after = leader;
    leader = false;
    if (after && key in go) location.assign(root + go[key]);
    else if (key === "g") leader = true;
    else if (key === "/") find();
    else if (key === "j") move(1);
    else if (key === "k") move(-1);
    else if (key === "x" && current) current.querySelector('input[type="checkbox"]')?.click();
    else if (key === "Enter" && current && !event.target.closest("a, button, summary")) {
      current.querySelector("[data-open]")?.click();
    } else if (key === "?") $("keys").showModal();
    else if (key === "t") toggleTheme();
    else if (key === " " && $("pause") && !event.target.matches("a, button, summary, [tabindex='0']")) togglePause();
    else return;
    event.preventDefault();
  });
})();
