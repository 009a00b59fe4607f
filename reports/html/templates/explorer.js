/* The records, by case and backend, and the speeds, as far as the filters let them through. */

const catalogue = JSON.parse(document.getElementById("catalogue").textContent);

const described = new Map(catalogue.cases.map(([run, suite, caseId, shape, description]) =>
  [`${run} ${suite} ${caseId}`, { shape: catalogue.texts[shape], description }]));

/* became, falseClaims: of a case of a backend, as attncheck.reports.analysis.recommendation has them. */
const groups = catalogue.groups.map(([run, backend, suite, caseId, needs, became, claims, records]) => ({
  about: described.get(`${run} ${suite} ${caseId}`),
  became: catalogue.texts[became],
  needed: new Set(catalogue.needs[needs].split(", ")),
  falseClaims: (catalogue.needs[claims] || "").split(", ").filter(Boolean),
  run: catalogue.runs[run],
  backend: catalogue.backends[backend],
  suite: catalogue.suites[suite],
  title: `${catalogue.suites[suite]}/${caseId}`,
  caseId,
  needs: catalogue.needs[needs],
  records: records.map(([check, outcome, round, seconds, body, repro]) => ({
    check: catalogue.checks[check],
    outcome: catalogue.outcomes[outcome],
    round,
    seconds,
    body: catalogue.bodies[body],
    repro: catalogue.repros[repro],
  })),
}));

const speeds = catalogue.speeds.map(([run, backend, suite, caseId, part, median, low, high, rounds, spread, bytes,
  flops, share, isFastest]) => ({
  run: catalogue.runs[run], backend: catalogue.backends[backend], suite: catalogue.suites[suite],
  title: `${catalogue.suites[suite]}/${caseId}`,
  caseId, part, median, low, high, rounds, spread, bytes, flops, share, isFastest,
}));

const SEVERITY = ["crashed", "timed_out", "errored", "failed", "xpassed", "xfailed", "passed", "unsupported", "unavailable"];

function severity(record) {
  return SEVERITY.indexOf(record.outcome);
}

function worse(one, other) {
  return severity(other) < severity(one) ? other : one;
}

/* Set anew by every filtering: the records shown, the worst of them, and what the columns show. */
function choose(group, records) {
  group.shown = records;
  group.worst = records.reduce(worse);
  const shares = records.map((record) => record.body.share).filter((share) => share !== undefined);
  group.share = shares.length ? Math.max(...shares.map((share) => (share === "inf" ? Infinity : share))) : null;
  return group;
}

function saidBy({ body }) {
  return body.what || (body.reasons || []).join("; ") || (body.notes || []).join("; ");
}

/* All that can be searched for in a group, lower case; put together once it is needed. */
function wordsOf(group) {
  if (group.words === undefined) {
    const texts = [group.backend, group.title, group.needs];
    if (group.about) texts.push(group.about.shape, group.about.description);
    for (const { check, outcome, body } of group.records) {
      texts.push(check, outcome, body.what, body.meaning, body.expected, body.message, body.trail,
        ...(body.reasons || []), ...(body.notes || []), ...(body.details || []));
    }
    group.words = [...new Set(texts)].join("\n").toLowerCase();
  }
  return group.words;
}

function isWanted(outcome, wanted) {
  if (wanted === "short") return FALLEN_SHORT.includes(outcome);
  if (wanted === "unexamined") return NOT_EXAMINED.includes(outcome);
  return !wanted || outcome === wanted;
}

function filtered(filter) {
  const words = filter.words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const group of groups) {
    if (filter.run && group.run !== filter.run) continue;
    if (filter.backend && group.backend !== filter.backend) continue;
    if (filter.suite && group.suite !== filter.suite) continue;
    if (words.length && !words.every((word) => wordsOf(group).includes(word))) continue;
    const records = group.records.filter((record) =>
      (!filter.check || record.check === filter.check) && isWanted(record.outcome, filter.outcome));
    if (records.length) found.push(choose(group, records));
  }
  return found;
}

function filteredSpeeds(filter) {
  const words = filter.words.toLowerCase().split(/\s+/).filter(Boolean);
  return speeds.filter((speed) => (!filter.run || speed.run === filter.run)
    && (!filter.backend || speed.backend === filter.backend) && (!filter.suite || speed.suite === filter.suite)
    && words.every((word) => `${speed.backend}\n${speed.title}\n${speed.part}`.toLowerCase().includes(word)));
}

/* A check that was made in several rounds counts once, with its worst outcome. */
function chips(group) {
  const checks = new Map();
  for (const record of group.shown) checks.set(record.check, worse(checks.get(record.check) || record, record));
  const counts = new Map();
  for (const { outcome } of checks.values()) counts.set(outcome, (counts.get(outcome) || 0) + 1);
  const ordered = [...counts].sort(([one], [other]) => SEVERITY.indexOf(one) - SEVERITY.indexOf(other));
  return element("div", { class: "chips" }, ordered.map(([outcome, count]) =>
    chip(count > 1 ? `${count} ${outcome}` : outcome, OUTCOME_TONES[outcome])));
}

function caseName(row) {
  return [element("span", { class: "suite" }, breakable(`${row.suite}/`)), element("wbr"), ...breakable(row.caseId)];
}

const runColumn = catalogue.runs.length > 1 ? [{ title: "run", value: (row) => row.run, cell: (row) => row.run }] : [];

const recordTable = new RowTable(document.getElementById("record-table"), {
  label: "Records", noun: "case", open: drill,
  columns: [
    ...runColumn,
    { title: "backend", value: (row) => row.backend, cell: (row) => breakable(row.backend) },
    { title: "case", isName: true, value: (row) => row.title, cell: caseName },
    { title: "outcome", value: (row) => severity(row.worst), cell: chips },
    { title: "worst error / allowed", isNumber: true, value: (row) => row.share,
      cell: (row) => (row.share === null ? "" : row.share === Infinity ? "inf" : budgets(row.share)) },
    { title: "what happened", style: "said", value: (row) => saidBy(row.worst),
      cell: (row) => shortened(saidBy(row.worst)) },
  ],
});

const speedTable = new RowTable(document.getElementById("speed-table"), {
  label: "All speeds", noun: "speed",
  columns: [
    ...runColumn,
    { title: "backend", value: (row) => row.backend, cell: (row) => breakable(row.backend) },
    { title: "case", isName: true, value: (row) => row.title, cell: caseName },
    { title: "part", value: (row) => row.part, cell: (row) => row.part },
    { title: "median", isNumber: true, value: (row) => row.median,
      cell: (row) => [timeText(row.median), row.isFastest ? " \u2713 fastest" : ""] },
    { title: "range", isNumber: true, value: (row) => row.high - row.low,
      cell: (row) => `${timeText(row.low)} to ${timeText(row.high)}` },
    { title: "spread", isNumber: true, value: (row) => row.spread,
      cell: (row) => (row.spread === null ? "" : percent(row.spread)) },
    { title: "rounds", isNumber: true, value: (row) => row.rounds, cell: (row) => String(row.rounds) },
    { title: "bytes/s", isNumber: true, value: (row) => row.bytes,
      cell: (row) => (row.bytes === null ? "" : `${bytesText(row.bytes)}/s`) },
    { title: "operations/s", isNumber: true, value: (row) => row.flops,
      cell: (row) => (row.flops === null ? "" : `${flopsText(row.flops)}/s`) },
    { title: "roofline", isNumber: true, value: (row) => row.share,
      cell: (row) => (row.share === null ? "" : percent(row.share)) },
  ],
});
