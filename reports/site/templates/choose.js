/* Which backends are right for what a reader needs, on the selected device. */

const LEVEL = "level", DEVICE = "device", ANY = "", ALL = "*";
const BELOW = "below", BELOW_TITLE = "right, but below the CUDA-graph level";
const form = document.getElementById("needs");

function valuesByKey(needs) {
  const features = [], forms = new Map();
  for (const need of needs) {
    const at = need.indexOf("=");
    if (at < 0) features.push(need);
    else {
      const key = need.slice(0, at);
      forms.set(key, [...(forms.get(key) || []), need.slice(at + 1)]);
    }
  }
  for (const values of forms.values()) values.sort((one, other) => Number(one) - Number(other) || (one < other ? -1 : 1));
  return [features, forms];
}

const FIRST = ["dtype", "kv_cache_dtype", "head_size", "block_size", "attn_type", "batch"];

function drawForm(index) {
  const at = addressed(), [features, forms] = valuesByKey(index.needs);
  const keys = [...new Set([...FIRST.filter((key) => forms.has(key)), ...forms.keys()])];
  const generations = [...new Set(index.devices.map(([, generation]) => generation))];
  const devices = [...index.devices.map(([name, generation]) => [name, `${name} (${generation})`]),
    ...generations.map((generation) => [ALL + generation, `all of ${generation}`]), [ALL, "all devices"]];
  form.replaceChildren(
    labelled("device", selection(DEVICE, devices, at.get(DEVICE))),
    labelled("CUDA-graph level, at least", selection(LEVEL, [[ANY, "any"], ...index.levels.slice(1).map((l) => [l, l])],
      at.get(LEVEL))),
    ...keys.map((key) => labelled(key, selection(key, [[ANY, "any"], ...forms.get(key).map((v) => [v, v])], at.get(key)))),
    element("fieldset", {}, element("legend", {}, "features"), features.map((feature) =>
      element("label", { class: "tick" }, element("input", { type: "checkbox", name: "feature", value: feature,
        checked: at.getAll("feature").includes(feature) }), feature))),
    element("button", { type: "reset" }, "Clear"));
}

function needsOf(data) {
  return [...data].filter(([key, value]) => value && key !== DEVICE && key !== LEVEL)
    .map(([key, value]) => (key === "feature" ? value : `${key}=${value}`));
}

/* The answer for a need that no backend declares as such: the kind of a batch. */
function answerOf(backend, groups, need) {
  const known = backend.answers[need];
  if (known) return { standing: known[0], words: known[1] };
  const own = groups.filter((group) => group.needed.has(need));
  const right = own.filter((group) => group.became === "right").length;
  const wrong = own.filter((group) => group.became === "short").length;
  if (wrong && !right) return { standing: "wrong", words: `wrong in ${wrong} of ${wrong}` };
  return right ? { standing: "right", words: `right (${right})` } : { standing: "not tried", words: "no case" };
}

function groupsOf(data, backend) {
  return backend.cases.map(([name, needs, count, claims, declared, level, run, time]) => ({
    title: data.cases[name], needed: new Set(data.needs[needs]), became: data.texts[count],
    falseClaims: data.needs[claims], declared: data.texts[declared], level: data.texts[level], run: data.runs[run], time,
  }));
}

/* What the cases that suit say of the CUDA-graph level: a standing and words, or null if the level suffices. */
function levelShort(groups, wanted, levels) {
  const rank = (level) => levels.indexOf(level);
  const measured = groups.filter((group) => group.level);
  if (!measured.length) {
    const claims = groups.some((group) => rank(group.declared) >= rank(wanted));
    return { standing: claims ? "declared" : "not tried", words: "CUDA-graph level not measured" };
  }
  const below = measured.filter((group) => rank(group.level) < rank(wanted));
  if (!below.length) return null;
  const claims = below.some((group) => rank(group.declared) >= rank(wanted));
  const lowest = levels[Math.min(...below.map((group) => rank(group.level)))];
  return { standing: claims ? "wrong" : BELOW,
    words: `CUDA-graph level ${lowest} measured in ${below.length} of ${measured.length} case${measured.length === 1 ? "" : "s"}` };
}

function judged(data, backend, needs, level, levels) {
  const own = groupsOf(data, backend);
  const answers = new Map(needs.map((need) => [need, answerOf(backend, own, need)]));
  const titles = (wrong) => {
    const names = new Set(wrong.map((group) => group.title));
    return backend.findings.filter(([, cases]) => cases.some((at) => names.has(data.cases[at])))
      .map(([title]) => `; ${title}`).join("");
  };
  const found = suitability(backend, answers, own, needs, titles);
  if (!needs.length && found.standing === "right in each") Object.assign(found, { standing: "not tried", words: "no declared case" });
  const short = level && found.standing.startsWith("right")
    && levelShort(own.filter((group) => needs.every((need) => group.needed.has(need))), level, levels);
  if (short) Object.assign(found, short, { words: `${short.words}; otherwise right: ${found.words}`, cases: [] });
  return found;
}

/* Backends with a timed case that all of them share; the others, such as latent ones, are left out. */
function comparable(timed) {
  const titles = (each) => timed.get(each).map((group) => group.title);
  const members = [], order = [...timed.keys()].sort((one, other) => titles(other).length - titles(one).length);
  let shared = null;
  for (const each of order) {
    const left = shared ? titles(each).filter((title) => shared.has(title)) : titles(each);
    if (left.length) {
      members.push(each);
      shared = new Set(left);
    } else each.remark = "timed, but no case in common with the others";
  }
  return members;
}

/* Times of equal machines and versions are comparable: means over the cases that all timed backends share. */
function addTimes(found) {
  const byEnvironment = new Map();
  for (const each of found.filter(({ standing }) => standing === "right")) {
    for (const group of each.cases.filter(({ time }) => time)) {
      const environment = group.run[2];
      if (!byEnvironment.has(environment)) byEnvironment.set(environment, new Map());
      const timed = byEnvironment.get(environment);
      if (!timed.has(each)) timed.set(each, []);
      timed.get(each).push(group);
    }
  }
  for (const timed of byEnvironment.values()) {
    const members = comparable(timed);
    const maps = (at) => members.map((each) => new Map(timed.get(each).map((g) => [g.title, g.time[at]])));
    const [means, lows, highs] = [0, 1, 2].map((at) => sharedMeans(maps(at)));
    if (!means) continue;
    const runs = new Set(members.flatMap((each) => timed.get(each).map((group) => group.run[0])));
    const isCertain = runs.size === 1 && members.every((each) => timed.get(each).every((group) => group.time[3] > 2));
    const first = means.means.indexOf(Math.min(...means.means));
    members.forEach((each, at) => {
      each.time = means.means[at];
      each.timed = means.cases;
      const apart = members.every((_, other) => other === first || lows.means[other] > highs.means[first]);
      each.remark = members.length < 2 ? "no other backend timed on the same machine and versions"
        : at === first ? (isCertain && apart ? "fastest" : "lowest, but not certain")
          : !isCertain || lows.means[at] <= highs.means[first] ? "within the noise, or not certain" : "";
    });
  }
}

function resultRows(members, level) {
  return members.map((each) => [
    element("a", { href: `backends/${each.backend.page}.html` }, breakable(each.backend.name)),
    element("span", {}, each.words, ...each.backend.marks.filter((mark) => level || mark !== "emulated").flatMap((mark) => [" ", chip(mark, "warn")])),
    each.time ? `${timeText(each.time)} (mean of ${each.timed} case${each.timed === 1 ? "" : "s"})${each.remark ? `, ${each.remark}` : ""}`
      : each.remark || "not timed",
    each.backend.version,
  ]);
}

async function show() {
  const index = chunks.get("index"), state = new FormData(form), level = state.get(LEVEL), needs = needsOf(state);
  const kept = new URLSearchParams([...state].filter(([, value]) => value));
  address(kept);
  const wanted = index.devices.filter(([name, generation]) => [name, ALL, ALL + generation].includes(state.get(DEVICE)));
  const loaded = await Promise.all(wanted.map(([, , page]) => load(`device-${page}`)));
  if (state.get(DEVICE) !== new FormData(form).get(DEVICE)) return;
  const parts = loaded.flatMap((data, at) => {
    const found = data.backends.map((backend) => judged(data, backend, needs, level, index.levels));
    addTimes(found);
    found.sort((one, other) => (one.time ?? Infinity) - (other.time ?? Infinity) || (one.backend.name < other.backend.name ? -1 : 1));
    const [name, generation] = wanted[at];
    const [right, alone, ...others] = Object.entries(index.standings);
    const tables = [right, [BELOW, BELOW_TITLE], alone, ...others].flatMap(([standing, title]) => {
      const members = found.filter((each) => each.standing === standing);
      return members.length ? [element("p", { class: "standing" }, chip(`${title} (${members.length})`, STANDING_TONES[standing] || "none")),
        table(`${title}, on ${name}`, ["backend", "what was measured", "forward", "version"], resultRows(members, level))] : [];
    });
    return [element("h2", {}, `On ${name} (${generation})`), ...tables];
  });
  document.getElementById("found").replaceChildren(...parts);
}

load("index").then((index) => {
  drawForm(index);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => show().catch(failed));
  form.addEventListener("reset", () => setTimeout(() => {
    for (const box of form.querySelectorAll("input")) box.checked = false;
    for (const select of form.querySelectorAll("select")) select.selectedIndex = 0;
    show().catch(failed);
  }));
  return show();
}).catch(failed);
