/* Filters, links into them, the theme, copying, printing: what holds the page together. */

const FILTERS = ["words", "run", "backend", "suite", "check", "outcome"];
const fields = Object.fromEntries(FILTERS.map((name) => [name, document.getElementById(`filter-${name}`)]));

function fill(select, options) {
  select.append(element("option", { value: "" }, "all"),
    ...options.map(([value, text]) => element("option", { value }, text)));
  select.parentElement.hidden = options.length < 2;
}

function same(names) {
  return names.map((name) => [name, name]);
}

function refresh() {
  const filter = Object.fromEntries(FILTERS.map((name) => [name, fields[name].value]));
  recordTable.show(filtered(filter));
  if (speeds.length) speedTable.show(filteredSpeeds(filter));
}

function look(link) {
  for (const name of FILTERS) fields[name].value = link.dataset[name] || "";
  refresh();
}

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(isDark));
  try {
    localStorage.setItem("attncheck-theme", isDark ? "dark" : "light");
  } catch {
    // A page opened as a file may not be allowed to keep anything.
  }
}

function chosenTheme() {
  try {
    return localStorage.getItem("attncheck-theme");
  } catch {
    return null;
  }
}

fill(fields.run, same(catalogue.runs));
fill(fields.backend, same(catalogue.backends));
fill(fields.suite, same(catalogue.suites));
fill(fields.check, same(catalogue.checks));
const present = new Set(groups.flatMap((group) => group.records.map((record) => record.outcome)));
fill(fields.outcome, [["short", "did not pass"], ["unexamined", "not examined"],
  ...same(catalogue.outcomes.filter((outcome) => present.has(outcome)))]);

let typed = 0;
fields.words.addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(refresh, 120);
});
for (const name of FILTERS.slice(1)) fields[name].addEventListener("change", refresh);
const form = document.getElementById("filters");
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(refresh));

document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-look]");
  if (link) look(link);
  const button = event.target.closest("[data-copy]");
  if (button) copy(button);
});

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
document.getElementById("theme").addEventListener("click", (event) =>
  setTheme(event.currentTarget.getAttribute("aria-pressed") !== "true"));
if (chosenTheme()) setTheme(chosenTheme() === "dark");
else document.getElementById("theme").setAttribute("aria-pressed", String(prefersDark.matches));

/* On paper nothing can be opened: what is closed is opened while it is printed. */
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("main details:not([open])")];
  for (const each of closed) each.open = true;
});
addEventListener("afterprint", () => {
  for (const each of closed) each.open = false;
});

document.getElementById("speed-explorer").hidden = !speeds.length;
document.documentElement.classList.add("ready");
refresh();
