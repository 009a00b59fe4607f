/* Which backends are right for what a reader needs: the rules of attncheck.reports.analysis.recommendation. */

const STANDING_TONES = { "right": "good", "right in each": "good", "wrong": "bad", "declared": "calm" };

/* Of one run: a map of backends, each with what the run says of every need alone. */
function answersOf(run) {
  const found = new Map();
  for (const [index, backend, need, standing, words] of catalogue.answers) {
    if (catalogue.runs[index] !== run) continue;
    const name = catalogue.backends[backend];
    if (!found.has(name)) found.set(name, new Map());
    found.get(name).set(need, { standing: catalogue.texts[standing], words: catalogue.texts[words] });
  }
  return found;
}

/* The titles of the findings of some cases. */
function titlesOf(run, backend, wrong) {
  const cases = new Set(wrong.map((group) => group.title));
  return catalogue.findings.filter(([index, name, , members]) => catalogue.runs[index] === run
    && catalogue.backends[name] === backend && members.some((title) => cases.has(title)))
    .map(([, , title]) => `; ${catalogue.texts[title]}`).join("");
}

function suitability(run, backend, answers, own, needs) {
  const all = own.filter((group) => needs.every((need) => group.needed.has(need)));
  const counted = all.filter((group) => group.became !== "short"
    || group.falseClaims.every((claim) => needs.includes(claim)));
  const right = counted.filter((group) => group.became === "right");
  const wrong = counted.filter((group) => group.became === "short");
  const alone = needs.map((need) => answers.get(need));
  const said = (standing) => needs.filter((_, index) => !standing || alone[index].standing === standing)
    .map((need) => `${need}: ${answers.get(need).words}`).join("; ");
  const has = (standing) => alone.some((answer) => answer.standing === standing);
  if (wrong.length) {
    return { backend, standing: "wrong",
      words: `wrong in ${wrong.length} of ${wrong.length + right.length}${titlesOf(run, backend, wrong)}` };
  }
  if (right.length) {
    const beyond = [...new Set(all.filter((group) => !counted.includes(group)).flatMap((group) => group.falseClaims))]
      .filter((claim) => !needs.includes(claim)).sort();
    const only = beyond.length ? `; fails only with ${beyond.join(", ")}` : "";
    return { backend, standing: "right", cases: right,
      words: `${right.length} case${right.length === 1 ? "" : "s"}${only}` };
  }
  const standing = ["wrong", "not declared", "not tried", "declared"].find(has) || "right in each";
  const short = standing === "wrong" ? own.filter((group) => group.became === "short" && needs.some((need, index) =>
    alone[index].standing === "wrong" && group.needed.has(need))) : [];
  return { backend, standing,
    words: said(standing === "right in each" ? "" : standing) + titlesOf(run, backend, short) };
}

/* Of the right ones, the geometric mean of forward over the cases that all timed ones have times of. */
function addTimes(run, found) {
  const timed = new Map();
  for (const each of found.filter(({ standing }) => standing === "right")) {
    const titles = new Set(each.cases.map((group) => group.title));
    const times = new Map(speeds.filter((speed) => speed.run === run && speed.backend === each.backend
      && speed.part === "forward" && titles.has(speed.title)).map((speed) => [speed.title, speed.median]));
    if (times.size) timed.set(each, times);
  }
  if (!timed.size) return;
  const [first] = timed.values();
  const shared = [...first.keys()].filter((title) => [...timed.values()].every((times) => times.has(title)));
  if (!shared.length) return;
  for (const [each, times] of timed) {
    each.time = Math.exp(shared.reduce((sum, title) => sum + Math.log(times.get(title)), 0) / shared.length);
    each.words += `, ${timeText(each.time)} (geometric mean over ${shared.length} case${shared.length === 1 ? "" : "s"})`;
  }
}

function recommended(run, needs) {
  const own = new Map();
  for (const group of groups) {
    if (group.run !== run || group.became === undefined) continue;
    if (!own.has(group.backend)) own.set(group.backend, []);
    own.get(group.backend).push(group);
  }
  const found = [...answersOf(run)].map(([backend, answers]) =>
    suitability(run, backend, answers, own.get(backend) || [], needs));
  addTimes(run, found);
  return found.sort((one, other) => compareValues(one.time, other.time, 1));
}

function showRecommended(finder) {
  const run = finder.dataset.finder;
  const needs = [...finder.querySelectorAll("input:checked")].map((box) => box.value);
  for (const select of finder.querySelectorAll("select")) {
    if (select.value) needs.push(`${select.dataset.key}=${select.value}`);
  }
  const found = needs.length ? recommended(run, needs) : [];
  const link = (each) => element("a", { class: "look", href: "#records", "data-look": "", "data-run": run,
    "data-backend": each.backend, "data-words": needs.join(" ") }, breakable(each.backend));
  finder.querySelector(".found").replaceChildren(...Object.entries(catalogue.standings).flatMap(([standing, title]) => {
    const members = found.filter((each) => each.standing === standing);
    return members.length ? [element("p", { class: "standing" }, chip(title, STANDING_TONES[standing] || "none")),
      element("ul", { class: "plain" }, members.map((each) =>
        element("li", {}, element("strong", {}, link(each)), ` ${each.words}`)))] : [];
  }));
}

for (const finder of document.querySelectorAll("[data-finder]")) {
  const form = finder.querySelector("form");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => showRecommended(finder));
  form.addEventListener("reset", () => setTimeout(() => showRecommended(finder)));
}
