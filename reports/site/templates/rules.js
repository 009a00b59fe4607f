/* How well a backend suits needs: the rules of attncheck.reports.analysis.recommendation. */

const STANDING_TONES = { "right": "good", "right in each": "good", "wrong": "bad", "declared": "calm" };

/* `own`: the backend's cases, each with its needs, count and false claims. `answers`: of each need alone. */
function suitability(backend, answers, own, needs, titlesOf) {
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
      words: `wrong in ${wrong.length} of ${wrong.length + right.length}${titlesOf(wrong)}` };
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
    words: said(standing === "right in each" ? "" : standing) + titlesOf(short) };
}

/* Geometric means over the titles that every map of times has; null if there is none. */
function sharedMeans(times) {
  if (!times.length) return null;
  const shared = [...times[0].keys()].filter((title) => times.every((each) => each.has(title)));
  if (!shared.length) return null;
  return { cases: shared.length, means: times.map((each) =>
    Math.exp(shared.reduce((sum, title) => sum + Math.log(each.get(title)), 0) / shared.length)) };
}
