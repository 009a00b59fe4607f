/* Elements made of text: whatever a record says becomes text, never markup. */

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const OUTCOME_TONES = {
  passed: "good", failed: "bad", errored: "bad", crashed: "bad", timed_out: "bad", xpassed: "bad",
  xfailed: "warn", unsupported: "calm", unavailable: "none",
};
const FALLEN_SHORT = ["crashed", "timed_out", "errored", "failed", "xpassed"];
const NOT_EXAMINED = ["unsupported", "unavailable"];

function chip(text, tone) {
  return element("span", { class: `chip t-${tone}` }, text);
}

const LONGEST = 160;

function shortened(text) {
  return text.length > LONGEST ? `${text.slice(0, LONGEST - 2)}\u2026` : text;
}

/* A name, which may be broken after its slashes, dots and underscores. */
function breakable(text) {
  return shortened(text).split(/(?<=[/._])/).flatMap((part, index) => (index ? [element("wbr"), part] : [part]));
}

/* Times in nanoseconds, in the unit that suits them; three digits that mean something. */
function scaled(value, units) {
  const [size, name] = units.find(([least]) => Math.abs(value) >= least * 0.9995) || units[units.length - 1];
  const shown = value / size;
  return `${shown >= 999.5 ? Math.round(shown).toLocaleString("en") : shown.toPrecision(3)} ${name}`;
}

function timeText(nanoseconds) {
  return scaled(nanoseconds, [[1e9, "s"], [1e6, "ms"], [1e3, "\u00b5s"], [1, "ns"]]);
}

function bytesText(count) {
  return scaled(count, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
}

function flopsText(count) {
  return scaled(count, [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1, "FLOP"]]);
}

function percent(share) {
  const shown = share * 100;
  return `${shown >= 9.95 ? Math.round(shown) : shown.toPrecision(2)}%`;
}

function budgets(share) {
  if (typeof share !== "number") return share;
  return share < 10 ? share.toFixed(2) : String(Number(share.toPrecision(3)));
}

function copyable(text) {
  return element("div", { class: "command" }, element("code", {}, text),
    element("button", { type: "button", "data-copy": "" }, "Copy"));
}

/* A page that was opened as a file may lack the clipboard's own interface. */
async function copy(button) {
  const text = button.previousElementSibling.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", { "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    done = document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}
