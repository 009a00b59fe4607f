/* What changed from one run to another of a backend: findings, and outcomes of cases that both examined. */

const form = document.getElementById("pair");
const BAD = new Set(FALLEN_SHORT);
const NONE = new Set(NOT_EXAMINED);

function kindOf(before, after) {
  if (before === after) return null;
  if (BAD.has(after) && !BAD.has(before)) return "worse";
  if (BAD.has(before) && !BAD.has(after) && !NONE.has(after)) return "better";
  return "other";
}

function outcomesOf(run, backend) {
  const found = new Map();
  for (const [name, outcomes] of run.backends[backend].cases) {
    for (const [check, outcome] of outcomes) found.set(`${name}\n${check}`, run.texts[outcome]);
  }
  return new Map([...found].map(([key, outcome]) => {
    const [name, check] = key.split("\n");
    return [`${name}, ${run.texts[check]}`, outcome];
  }));
}

function drawForm(index) {
  const at = addressed(), names = [...index.backends].sort();
  const backend = names.includes(at.get("backend")) ? at.get("backend") : names[0];
  const own = index.runs.filter((run) => run[4].includes(index.backends.indexOf(backend)))
    .map(([key, name, started, device]) => [key, `${started.slice(0, 10)} ${device}: ${name}`, device]);
  const base = own.slice(1).find((run) => run[2] === own[0][2]) || own[1] || own[0];
  form.replaceChildren(
    labelled("backend", selection("backend", names.map((name) => [name, name]), backend)),
    labelled("base", selection("base", own, at.get("base") || base[0])),
    labelled("new", selection("new", own, at.get("new") || own[0][0])));
}

function changedRows(base, next, backend) {
  const before = outcomesOf(base, backend), after = outcomesOf(next, backend);
  const shared = [...after.keys()].filter((key) => before.has(key));
  const order = ["worse", "better", "other"];
  const rows = shared.map((key) => [key, before.get(key), after.get(key), kindOf(before.get(key), after.get(key))])
    .filter((row) => row[3]).sort((one, other) => order.indexOf(one[3]) - order.indexOf(other[3]));
  return { rows, shared: shared.length, lost: before.size - shared.length, gained: after.size - shared.length };
}

function titled(findings, others) {
  const known = new Set(others.map(([words]) => words));
  return findings.filter(([words]) => !known.has(words)).map(([, title]) => title);
}

const TONES = { worse: "bad", better: "good", other: "calm" };
const MOST = 500;

async function show() {
  const state = new FormData(form), backend = state.get("backend");
  address(new URLSearchParams([...state]));
  const [base, next] = await Promise.all(["base", "new"].map((name) => load(`run-${state.get(name)}`)));
  const { rows, shared, lost, gained } = changedRows(base, next, backend);
  const [old, now] = [base, next].map((run) => run.backends[backend].findings);
  const list = (title, members) => [element("h2", {}, title), members.length
    ? element("ul", { class: "plain" }, members.map((text) => element("li", {}, text))) : element("p", {}, "none")];
  const facts = Object.keys({ ...base.facts, ...next.facts }).filter((name) => base.facts[name] !== next.facts[name]
    && !["Started", "Suites", "Checks"].includes(name));
  document.getElementById("found").replaceChildren(
    element("p", {}, `${shared} outcomes compared, ${rows.length} changed; ${lost} only in the base, ${gained} only in the new run.`),
    ...list("Findings that appeared", titled(now, old)),
    ...list("Findings that are gone", titled(old, now)),
    element("h2", {}, "Outcomes that changed"),
    rows.length ? table("Outcomes that changed", ["case and check", "base", "new", "change"], rows.slice(0, MOST).map(([name, before, after, kind]) =>
      [name, before, after, chip(kind, TONES[kind])])) : element("p", {}, "none"),
    rows.length > MOST ? element("p", {}, `The first ${MOST} of ${rows.length} are shown.`) : "",
    element("h2", {}, "Versions and machine"),
    facts.length ? table("Versions and machine", ["fact", "base", "new"], facts.map((name) =>
      [name, base.facts[name] || "none", next.facts[name] || "none"])) : element("p", {}, "equal"),
    element("h2", {}, "Times"),
    element("p", {}, "Times need a test of significance. This command compares them:"),
    copyable(`attncheck compare ${base.name} ${next.name}`));
}

load("index").then((index) => {
  if (!index.runs.length) throw new Error("There is no run with a backend.");
  drawForm(index);
  form.addEventListener("change", (event) => {
    if (event.target.name === "backend") {
      address(new URLSearchParams({ backend: event.target.value }));
      drawForm(index);
    }
    show().catch(failed);
  });
  document.addEventListener("click", (event) => { if (event.target.matches("[data-copy]")) copy(event.target); });
  return show();
}).catch(failed);
