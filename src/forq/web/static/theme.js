// The theme that this browser has chosen, before the first paint.
"use strict";
try {
  const theme = localStorage.getItem("forq-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is off: the theme of the system */ }
