"use strict";
/* The theme: that of the system, unless the reader selected another. */
{
  const root = document.documentElement;
  const kept = () => { try { return localStorage.getItem("attncheck-theme"); } catch { return null; } };
  const show = (theme) => {
    if (theme) root.dataset.theme = theme;
    const isDark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.getElementById("theme")?.setAttribute("aria-pressed", String(isDark));
    return isDark;
  };
  root.classList.add("ready");
  show(kept());
  document.addEventListener("DOMContentLoaded", () => {
    let isDark = show(kept());
    document.getElementById("theme").addEventListener("click", () => {
      isDark = show(isDark ? "light" : "dark");
      try { localStorage.setItem("attncheck-theme", isDark ? "dark" : "light"); } catch { /* A file may not keep it. */ }
    });
  });
}
