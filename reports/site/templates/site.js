"use strict";
/* Filters rows, and judges combinations of needs by the rules in the page's data. The address holds the selection. */

const form = document.querySelector("form");
const rows = [...document.querySelectorAll("form ~ .scroll tbody tr")];
const block = document.getElementById("data");
const data = block && JSON.parse(block.textContent);

/* The cases that need everything selected, without those that fail or are refused for another need. */
function counted(cases, needs) {
  const all = (set) => data.sets[set].every((need) => needs.includes(need));
  const some = (set) => !data.sets[set].length || data.sets[set].some((need) => needs.includes(need));
  return cases.filter(([own, , blamedAll, blamedOne]) =>
    needs.every((need) => data.sets[own].includes(need)) && all(blamedAll) && some(blamedOne));
}

function standingOf(backend, cases, needs) {
  const found = { together: cases.map((each) => each[1]), alone: needs.map((need) => backend.alone[need] ?? data.last) };
  const rule = data.rules.find(([which, standing]) => found[which].includes(standing));
  return rule ? rule[1] : data.each;
}

/* Geometric means over the right cases with a time: the multiple of the fastest, and its interval if all have one. */
function paceOf(cases) {
  const timed = cases.filter((each) => each.length > 4 && each[1] === data.right);
  if (!timed.length) return { ratio: Number.MAX_VALUE, words: "" };
  const mean = (at) => Math.exp(timed.reduce((sum, each) => sum + Math.log(each[at]), 0) / timed.length);
  const text = (value) => (value < 10 ? value.toFixed(2) : value.toFixed(0));
  const interval = timed.every((each) => each[5]) ? ` (${text(mean(5))} to ${text(mean(6))})` : " *";
  const ratio = mean(4);
  const place = ratio < 1.0005 ? "fastest" : `${text(ratio)} times the fastest`;
  return { ratio, words: `${place}${interval}, ${timed.length} case${timed.length === 1 ? "" : "s"}` };
}

/* Fill the columns that depend on the selection, and put rows in the order of their standings. */
function judge(names) {
  const needs = names.map((name) => data.needs.indexOf(name));
  const judged = rows.map((row, at) => {
    const backend = data.backends[at];
    const cases = needs.length ? counted(backend.cases, needs) : backend.cases;
    const standing = standingOf(backend, cases, needs);
    const [title, tone] = data.standings[standing];
    const number = cases.filter((each) => each[1] === standing).length;
    const cell = row.querySelector(".together");
    cell.className = `together t-${tone}`;
    cell.textContent = number && standing !== data.last ? `${title} (${number})` : title;
    const pace = paceOf(cases);
    row.querySelector(".time").textContent = pace.words;
    return { row, standing, ratio: pace.ratio };
  });
  for (const cell of document.querySelectorAll(".together")) cell.hidden = !needs.length;
  for (const heading of document.querySelectorAll("[data-need]")) {
    heading.classList.toggle("selected", names.includes(heading.dataset.need));
  }
  const isTimed = rows.some((row) => row.querySelector(".time").textContent);
  for (const cell of document.querySelectorAll(".time")) cell.hidden = !isTimed;
  const inOrder = (one, other) => one.standing - other.standing || one.ratio - other.ratio;
  if (needs.length) judged.sort(inOrder);
  document.querySelector("tbody").append(...judged.map(({ row }) => row));
}

function show() {
  const text = form.elements.find.value.toLowerCase();
  for (const row of rows) row.hidden = !(data ? row.cells[0] : row).textContent.toLowerCase().includes(text);
  const chosen = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
  if (data) judge(chosen.getAll("need"));
  history.replaceState(null, "", `${chosen}` ? `?${chosen}` : location.pathname);
  for (const tab of document.querySelectorAll(".tabs a")) tab.search = chosen;
}

/* The selection of the address; a need without a control, as of a preset, gets a hidden one. */
function select(address) {
  form.elements.find.value = address.get("find") || "";
  const wanted = new Set(address.getAll("need"));
  for (const control of form.querySelectorAll("[name=need]")) {
    const options = control.options ? [...control.options].map((option) => option.value) : [control.value];
    const value = options.find((option) => wanted.delete(option));
    if (control.options) control.value = value || "";
    else control.checked = value !== undefined;
  }
  for (const need of wanted) {
    const control = document.createElement("input");
    form.append(Object.assign(control, { type: "hidden", name: "need", value: need }));
  }
}

if (form) {
  document.documentElement.classList.add("ready");
  select(new URLSearchParams(location.search));
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}

/* With --serve, load the page again when the site was written again. */
const written = document.querySelector("script[data-written]")?.dataset.written;
let known = null;
if (written) {
  setInterval(async () => {
    try {
      const now = await (await fetch(written, { cache: "no-store" })).text();
      if (known !== null && now !== known) location.reload();
      known = now;
    } catch { /* The server has ended, or writes the site just now. */ }
  }, 1000);
}
