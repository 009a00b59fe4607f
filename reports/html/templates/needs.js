/* Which backends of a run are right for what a reader needs. */

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

/* Of the right ones, the geometric mean of forward over the cases that all timed ones have times of. */
function addTimes(run, found) {
  const timed = new Map();
  for (const each of found.filter(({ standing }) => standing === "right")) {
    const titles = new Set(each.cases.map((group) => group.title));
    const times = new Map(speeds.filter((speed) => speed.run === run && speed.backend === each.backend
      && speed.part === "forward" && titles.has(speed.title)).map((speed) => [speed.title, speed.median]));
    if (times.size) timed.set(each, times);
  }
  const shared = sharedMeans([...timed.values()]);
  if (!shared) return;
  [...timed.keys()].forEach((each, index) => {
    each.time = shared.means[index];
    const { cases } = shared;
    each.words += `, ${timeText(each.time)} (geometric mean over ${cases} case${cases === 1 ? "" : "s"})`;
  });
}

function recommended(run, needs) {
  const own = new Map();
  for (const group of groups) {
    if (group.run !== run || group.became === undefined) continue;
    if (!own.has(group.backend)) own.set(group.backend, []);
    own.get(group.backend).push(group);
  }
  const found = [...answersOf(run)].map(([backend, answers]) =>
    suitability(backend, answers, own.get(backend) || [], needs, (wrong) => titlesOf(run, backend, wrong)));
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
