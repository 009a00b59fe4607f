"use strict";
{
/* Colours of outcomes, the gravest outcome first. */
const TONES = {
  crashed: "bad", timed_out: "bad", errored: "bad", failed: "bad", xpassed: "bad", xfailed: "warn", passed: "good",
  unsupported: "calm", unavailable: "none",
};
const OUTCOMES = Object.keys(TONES);
const GROUPS = { "did not pass": OUTCOMES.slice(0, 5), "not examined": OUTCOMES.slice(7) };
const PAGE_ROWS = 100;

const data = JSON.parse(document.getElementById("data").textContent);
/* Lists of texts are stored as numbers. */
for (const content of data.contents) {
  for (const [name, value] of Object.entries(content)) {
    if (typeof value[0] === "number") content[name] = value.map((place) => data.texts[place]);
  }
}
const rows = data.groups.map(([run, backend, suite, caseId, needs, about, records]) => ({
  run: data.texts[run], backend: data.texts[backend], suite: data.texts[suite],
  case: `${data.texts[suite]}/${caseId}`, needs: data.texts[needs], about: data.texts[about],
  records: records.map(([check, outcome, round, seconds, content, ...command]) => ({
    check: data.texts[check], outcome: data.texts[outcome], round, seconds, content: data.contents[content],
    command: command.map((part) => data.texts[part]).join(""),
  })),
}));

/* Return an element. Children that are texts become text, never markup. */
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.flat());
  return made;
}

function chip(text, tone) {
  return element("b", { class: `chip t-${tone}` }, text);
}

/* ---- The table of records ---- */

function share(row) {
  const shares = row.shown.map(({ content }) => content[data.share]).filter((value) => value !== undefined);
  return shares.length ? Math.max(...shares.map((value) => (value === "inf" ? Infinity : value))) : null;
}

function worst(row) {
  return Math.min(...row.shown.map(({ outcome }) => OUTCOMES.indexOf(outcome)));
}

function stated(row) {
  const record = row.shown.find(({ outcome }) => outcome === OUTCOMES[worst(row)]);
  return record.content[""] || (record.content.notes || []).join("; ");
}

/* A check of several rounds counts once, with its gravest outcome. */
function outcomeChips(row) {
  const byCheck = new Map();
  for (const { check, outcome } of row.shown) {
    byCheck.set(check, Math.min(OUTCOMES.indexOf(outcome), byCheck.get(check) ?? OUTCOMES.length));
  }
  const found = [...byCheck.values()];
  return OUTCOMES.flatMap((outcome, place) => {
    const count = found.filter((each) => each === place).length;
    return count ? [chip(count > 1 ? `${count} ${outcome}` : outcome, TONES[outcome]), " "] : [];
  });
}

function shareText(value) {
  if (value === null) return "";
  if (value === Infinity) return "inf";
  return value < 10 ? value.toFixed(2) : String(Number(value.toPrecision(3)));
}

const COLUMNS = [
  { title: "run", value: (row) => row.run },
  { title: "backend", value: (row) => row.backend },
  { title: "case", value: (row) => row.case },
  { title: "outcome", value: worst, cell: outcomeChips },
  { title: data.share, value: share, cell: (row) => shareText(share(row)), style: "number" },
  { title: "what happened", value: stated, cell: (row) => element("div", { class: "stated" }, stated(row)) },
].filter(({ title }) => title !== "run" || new Set(rows.map(({ run }) => run)).size > 1);

const form = document.getElementById("filters");
const FIELDS = [...form.elements].filter((field) => field.name);
let shown = [];
let page = 0;
let sorted = 0; // the number of the column from 1, negative if descending, 0 for the order of the run

function matches(record, check, outcome) {
  const outcomes = GROUPS[outcome] || [outcome];
  return (!check || record.check === check) && (!outcome || outcomes.includes(record.outcome));
}

/* All texts of a row, lower case; put together when they are first searched. */
function textOf(row) {
  const contents = row.records.map(({ check, outcome, content }) => [check, outcome, Object.values(content)]);
  row.text ??= [row.backend, row.case, row.needs, row.about, contents].flat(4).join("\n").toLowerCase();
  return row.text;
}

function select() {
  const chosen = Object.fromEntries(FIELDS.map(({ name, value }) => [name, value]));
  const words = chosen.words.toLowerCase().split(/\s+/).filter(Boolean);
  shown = rows.filter((row) => {
    if (["run", "backend", "suite"].some((name) => chosen[name] && row[name] !== chosen[name])) return false;
    row.shown = row.records.filter((record) => matches(record, chosen.check, chosen.outcome));
    return row.shown.length && words.every((word) => textOf(row).includes(word));
  });
  if (sorted) {
    const { value } = COLUMNS[Math.abs(sorted) - 1];
    const keys = new Map(shown.map((row) => [row, value(row)]));
    shown.sort((one, other) => compare(keys.get(one), keys.get(other), Math.sign(sorted)));
  }
  page = 0;
  draw();
}

const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

/* What is missing comes last in both directions. */
function compare(one, other, direction) {
  const missing = (value) => value === null || value === "" || value === "-";
  if (missing(one) || missing(other)) return missing(one) - missing(other);
  return direction * (typeof one === "number" ? one - other : collator.compare(one, other));
}

function draw() {
  const first = page * PAGE_ROWS;
  const part = shown.slice(first, first + PAGE_ROWS);
  document.querySelector(".rows tbody").replaceChildren(...part.map(line));
  const count = `${shown.length} case${shown.length === 1 ? "" : "s"}`;
  document.querySelector(".pager [role=status]").textContent =
    part.length < shown.length ? `${first + 1} to ${first + part.length} of ${count}` : count;
  document.getElementById("back").disabled = page === 0;
  document.getElementById("forth").disabled = first + part.length >= shown.length;
  document.querySelectorAll(".rows thead th").forEach((head, place) => mark(head, place + 1 === Math.abs(sorted) && sorted));
}

function line(row) {
  const button = element("button", { type: "button", class: "open", "aria-expanded": "false",
    "aria-label": `Details of ${row.case}` });
  const cells = COLUMNS.map(({ value, cell, style }) => element("td", { class: style || "" }, (cell || value)(row)));
  const made = element("tr", {}, element("td", {}, button), cells);
  made.addEventListener("click", (event) => {
    const isSelecting = String(document.getSelection()) !== "";
    if (event.target !== button && (isSelecting || event.target.closest("a, button"))) return;
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) made.nextElementSibling.remove();
    else made.after(element("tr", { class: "opened" }, element("td", { colspan: COLUMNS.length + 1 }, details(row))));
  });
  return made;
}

/* ---- What opens below a case ---- */

function details(row) {
  const alike = new Map();
  for (const record of row.shown) {
    const key = JSON.stringify([record.check, record.outcome, record.content]);
    alike.set(key, [...(alike.get(key) || []), record]);
  }
  const link = element("a", { href: `#${new URLSearchParams({ words: row.case })}` }, "This case on every backend");
  return element("div", {}, element("h3", {}, `${row.backend}: ${row.case}`), element("p", {}, row.about),
    element("p", { class: "small" }, row.needs ? `Needs ${row.needs}. ` : "", link),
    [...alike.values()].map(([record, ...others]) => element("section", { class: "record" },
      element("h4", {}, `${record.check} `, chip(record.outcome, TONES[record.outcome]),
        element("span", { class: "small" }, others.length ? ` in ${others.length + 1} rounds` : ` ${record.seconds} s`)),
      Object.entries(record.content).flatMap(([name, value]) => content(name, value)), command(record.command))));
}

/* Return elements of one member of a record: a text, a list of texts, a table, or a list of figures. */
function content(name, value) {
  const title = name ? [element("p", { class: "small" }, name)] : [];
  if (Array.isArray(value) && Array.isArray(value[0])) return [...title, smallTable(value)];
  if (Array.isArray(value)) return [...title, element("ul", {}, value.map((text) => element("li", {}, lines(text))))];
  if (value !== null && typeof value === "object") {
    const pairs = Object.entries(value).map(([key, each]) => element("div", {}, element("dt", {}, key),
      element("dd", {}, String(each))));
    return [...title, element("dl", {}, pairs)];
  }
  return [element("div", { class: "member" }, element("span", { class: "small" }, name ? `${name}: ` : ""),
    lines(String(value)))];
}

/* Return a text as it is, or as an element that keeps its lines. */
function lines(text) {
  return text.includes("\n") ? element("pre", { tabindex: 0 }, text) : text;
}

function smallTable([heads, ...lines]) {
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, lines.map((cells) => element("tr", {}, cells.map((cell) => element("td", {}, cell)))))));
}

function command(text) {
  return element("div", { class: "command" }, element("code", {}, text),
    element("button", { type: "button", "data-copy": "" }, "Copy"));
}

/* ---- Filters, with their state in the address ---- */

function fill(field, values) {
  field.append(element("option", { value: "" }, "all"), ...values.map((value) => element("option", { value }, value)));
  field.parentElement.hidden = values.length < 2;
}

function distinct(values) {
  return [...new Set(values)];
}

const records = rows.flatMap((row) => row.records);
for (const name of ["run", "backend", "suite"]) fill(form.elements[name], distinct(rows.map((row) => row[name])));
fill(form.elements.check, distinct(records.map(({ check }) => check)));
fill(form.elements.outcome, [...Object.keys(GROUPS), ...distinct(records.map(({ outcome }) => outcome))]);

function writeAddress() {
  const state = new URLSearchParams(FIELDS.filter(({ value }) => value).map(({ name, value }) => [name, value]));
  if (sorted) state.set("sort", sorted);
  history.replaceState(null, "", `#${state.size ? state : "records"}`);
  select();
}

/* Set the filters from the address, unless it is the name of a section. */
function readAddress() {
  if (location.hash.includes("=")) {
    const state = new URLSearchParams(location.hash.slice(1));
    for (const field of FIELDS) field.value = state.get(field.name) || "";
    sorted = COLUMNS[Math.abs(Number(state.get("sort"))) - 1] ? Number(state.get("sort")) : 0;
    document.getElementById("records").scrollIntoView();
  }
  select();
}

let typed = 0;
form.addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(writeAddress, 120);
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(writeAddress));
addEventListener("hashchange", readAddress);
for (const [name, step] of [["back", -1], ["forth", 1]]) {
  document.getElementById(name).addEventListener("click", () => {
    page += step;
    draw();
  });
}

/* ---- Sorting, and links from the tables above into the records ---- */

function mark(head, direction) {
  if (direction) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  else head.removeAttribute("aria-sort");
}

function sortable(head, sort) {
  const button = element("button", { type: "button" }, ...head.childNodes);
  button.addEventListener("click", sort);
  head.replaceChildren(button);
  return head;
}

function sortBody(table, place, head) {
  const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const key = (row) => row.cells[place].textContent.replaceAll(",", "").trim();
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort((one, other) => compare(key(one), key(other), direction)));
  for (const each of table.tHead.rows[0].cells) mark(each, each === head && direction);
}

/* Link the cells of a table of backends by checks, suites or anything else to the records that they count. */
function linkCells(table) {
  const names = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  for (const row of table.tBodies[0].rows) {
    [...row.cells].forEach((cell, place) => {
      const name = place ? names[place] : row.cells[0].firstChild.textContent;
      const wanted = { backend: row.cells[0].firstChild.textContent };
      for (const field of ["check", "suite"]) if (hasOption(field, name)) wanted[field] = name;
      if (!hasOption("backend", wanted.backend) || (place && Object.keys(wanted).length < 2)) return;
      if (cell.textContent === "-") return;
      cell.replaceChildren(element("a", { class: "look", href: `#${new URLSearchParams(wanted)}` }, ...cell.childNodes));
    });
  }
}

function hasOption(field, value) {
  return value !== "" && [...form.elements[field].options].some((option) => option.value === value);
}

for (const table of document.querySelectorAll("main section:not(#explorer) table")) {
  if (table.tHead.rows[0].cells[0].textContent === "backend") linkCells(table);
  [...table.tHead.rows[0].cells].forEach((head, place) => {
    if (head.tagName === "TH") sortable(head, () => sortBody(table, place, head));
  });
}
document.querySelector(".rows thead tr").append(element("td", {}), ...COLUMNS.map(({ title, style }, place) =>
  sortable(element("th", { scope: "col", class: style || "" }, title), () => {
    sorted = sorted === place + 1 ? -sorted : place + 1;
    writeAddress();
  })));
for (const heading of document.querySelectorAll(".card > h3")) {
  const [backend, ...title] = heading.textContent.replace(/\.\.\.$/, "").split(": ");
  const wanted = new URLSearchParams({ backend, words: title.join(": ") });
  heading.after(element("p", { class: "small" }, element("a", { href: `#${wanted}` }, "Records of this finding")));
}

/* ---- Copying, theme, printing ---- */

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const text = button.previousElementSibling;
  try {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  } catch {
    // A page that was opened as a file may lack the clipboard: the line is selected for the keyboard.
    getSelection().selectAllChildren(text);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

/* A page that was opened as a file may not be allowed to store anything. */
function stored(value) {
  try {
    if (value) localStorage.setItem("attncheck-theme", value);
    return localStorage.getItem("attncheck-theme");
  } catch {
    return null;
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").setAttribute("aria-pressed", String(theme === "dark"));
}

document.getElementById("theme").addEventListener("click", (event) => {
  const theme = event.currentTarget.getAttribute("aria-pressed") === "true" ? "light" : "dark";
  setTheme(theme);
  stored(theme);
});
setTheme(stored() || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));

/* What is folded is opened while it is printed. */
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("main details:not([open])")];
  for (const each of closed) each.open = true;
});
addEventListener("afterprint", () => {
  for (const each of closed) each.open = false;
});

document.documentElement.classList.add("ready");
readAddress();
}
