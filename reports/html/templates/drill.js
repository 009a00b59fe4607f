/* What opens below a case: every check that was made of it, with all that its record says. */

function drill(group) {
  const checks = new Map();
  for (const record of group.shown) {
    if (!checks.has(record.check)) checks.set(record.check, []);
    checks.get(record.check).push(record);
  }
  return [
    element("h3", {}, `${group.backend}: ${group.title}`),
    group.about ? element("p", { class: "shape" }, group.about.shape) : null,
    group.about && group.about.description ? element("p", {}, group.about.description) : null,
    element("p", { class: "legend" }, group.needs ? `Needs ${group.needs}. ` : "",
      element("a", { href: "#records", "data-look": "", "data-words": group.title }, "The same case on every backend")),
    ...[...checks.values()].map(answer),
  ];
}

/* Records of one check: one, or one a round; what several say alike stands there once. */
function answer(records) {
  const alike = new Map();
  for (const record of records) {
    const key = `${record.outcome} ${record.body.timing ? "timing" : catalogue.bodies.indexOf(record.body)}`;
    if (!alike.has(key)) alike.set(key, []);
    alike.get(key).push(record);
  }
  const seconds = records.reduce((sum, record) => sum + record.seconds, 0);
  return element("section", { class: "answer" },
    element("h4", {}, records[0].check, ...[...alike.values()].map(([record, ...others]) =>
      chip(others.length ? `${record.outcome} in ${others.length + 1} rounds` : record.outcome,
        OUTCOME_TONES[record.outcome])),
    element("span", { class: "small" }, seconds >= 0.0005 ? timeText(seconds * 1e9) : "")),
    ...[...alike.values()].map((members) => [
      records.length > members.length
        ? element("p", { class: "small" }, `Round ${members.map((record) => record.round + 1).join(", ")}:`) : null,
      ...story(members[0].body),
      members[0].body.timing ? timing(members) : null,
    ]).flat(),
    copyable(records[0].repro));
}

function story(body) {
  const said = [];
  const line = (title, text) => element("p", {}, element("strong", {}, `${title} `), text);
  if (body.what) said.push(element("p", { class: "what clipped" }, body.what));
  if (body.expected) said.push(line("Expected:", body.expected));
  if (body.meaning) said.push(element("p", {}, body.meaning));
  if (body.reasons) said.push(list(body.reasons), body.by === "attncheck" ? element("p", { class: "small" },
    "Left out by attncheck.") : null);
  if (body.details) said.push(...body.details.map((text) => element(text.includes("\n") ? "pre" : "p", {}, text)));
  if (body.figures) said.push(figures(body.figures));
  if (body.notes) said.push(list(body.notes));
  if (body.message) said.push(element("pre", {}, body.message));
  if (body.trail) said.push(element("pre", {}, body.trail));
  if (body.graph) said.push(graph(body.graph));
  return said;
}

function list(lines) {
  return element("ul", { class: "plain clipped" }, lines.map((text) => element("li", {}, text)));
}

function figures(values) {
  return element("dl", { class: "figures" }, Object.entries(values).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

function small(heads, rows) {
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, rows.map((cells) => element("tr", {}, cells.map((cell) => element("td", {}, cell)))))));
}

function graph(levels) {
  const tones = { passed: "good", failed: "bad" };
  return element("div", {},
    element("p", {}, `Declared ${levels.declared}, measured ${levels.measured}, ${levels.recorder} graphs.`),
    levels.notes.length ? list(levels.notes) : null,
    element("details", {}, element("summary", {}, `${levels.probes.length} probes`),
      small(["probe", "level", "outcome", "reason"], levels.probes.map(([name, level, outcome, reason]) =>
        [name, level, chip(outcome, tones[outcome] || "none"), reason]))));
}

/* A line a part and round; the box shows where the samples lie, on one scale a part. */
function timing(records) {
  const parts = new Map();
  for (const record of records) {
    for (const [part, ...latency] of record.body.timing.parts) {
      if (!parts.has(part)) parts.set(part, []);
      parts.get(part).push([record.round, latency]);
    }
  }
  const rows = [...parts].flatMap(([part, rounds]) => {
    const samples = rounds.map(([, latency]) => latency[5]).filter((quartiles) => quartiles.length);
    const ends = [Math.min(...samples.map((quartiles) => quartiles[0])),
      Math.max(...samples.map((quartiles) => quartiles[4]))];
    return rounds.map(([round, [clock, median, low, high, count, quartiles, isSettled, bytes, flops]]) => [
      part, String(round + 1), timeText(median), `${timeText(low)} to ${timeText(high)}`, String(count),
      quartiles.length ? box(quartiles, ends) : "", clock, bytes ? bytesText(bytes) : "",
      flops ? flopsText(flops) : "", isSettled ? "yes" : "no",
    ]);
  });
  const [{ body: { timing: first } }] = records;
  const notes = [...new Set(records.flatMap((record) => record.body.timing.notes))];
  return element("div", {},
    small(["part", "round", "median", "interval", "samples", "least to most, half of them in the box", "clock",
      "bytes", "operations", "settled"], rows),
    element("p", { class: "small" }, [`${first.cache} cache`,
      first.ceilings ? `copy ${bytesText(first.ceilings[0])}/s, matmul of ${first.ceilings[2]} ` +
        `${flopsText(first.ceilings[1])}/s` : "", device(first.device)].filter(Boolean).join("; ")),
    first.kernels.length ? small(["kernel", "launches", "together"], first.kernels.map(([name, count, ns]) =>
      [name, String(count), timeText(ns)])) : null,
    notes.length ? list(notes) : null);
}

function device(state) {
  if (!state) return "";
  const clock = state.sm_clock_mhz ? `SM clock ${state.sm_clock_mhz}` +
    `${state.max_sm_clock_mhz ? ` of ${state.max_sm_clock_mhz}` : ""} MHz` : "";
  const heat = state.temperature_c ? `${state.temperature_c} \u00b0C` : "";
  const held = state.throttle_reasons.length ? `held back: ${state.throttle_reasons.join(", ")}` : "";
  return [clock, heat, held].filter(Boolean).join(", ");
}

function box(quartiles, [least, most]) {
  const space = "http://www.w3.org/2000/svg";
  const drawn = document.createElementNS(space, "svg");
  const at = (value) => 2 + 156 * (most > least ? (value - least) / (most - least) : 0.5);
  const shapes = [
    ["path", { d: `M${at(quartiles[0])} 7H${at(quartiles[4])}`, style: "stroke: var(--muted)" }],
    ["rect", { x: at(quartiles[1]), y: 2, width: Math.max(at(quartiles[3]) - at(quartiles[1]), 1), height: 10,
      style: "fill: var(--calm-ground); stroke: var(--calm)" }],
    ["path", { d: `M${at(quartiles[2])} 1V13`, style: "stroke: var(--ink); stroke-width: 2" }],
  ];
  Object.entries({ viewBox: "0 0 160 14", width: 160, height: 14, class: "box", role: "img",
    "aria-label": quartiles.map(timeText).join(", ") }).forEach(([name, value]) => drawn.setAttribute(name, value));
  for (const [tag, attributes] of shapes) {
    const shape = document.createElementNS(space, tag);
    Object.entries(attributes).forEach(([name, value]) => shape.setAttribute(name, value));
    drawn.append(shape);
  }
  return drawn;
}
