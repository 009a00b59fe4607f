/* Chunks of data, which are scripts, and the state of a page, which is in its address. */

const chunks = new Map();
const waiting = new Map();

function chunk(name, data) {
  chunks.set(name, data);
  (waiting.get(name) || []).forEach((resolve) => resolve(data));
}

function load(name) {
  if (chunks.has(name)) return Promise.resolve(chunks.get(name));
  return new Promise((resolve, reject) => {
    const others = waiting.get(name);
    waiting.set(name, [...(others || []), resolve]);
    if (others) return;
    document.head.append(element("script", { src: `data/${name}.js`,
      onerror: () => reject(new Error(`data/${name}.js cannot be loaded`)) }));
  });
}

function addressed() {
  return new URLSearchParams(location.search);
}

function address(parameters) {
  const text = parameters.toString();
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
}

function labelled(text, select, attributes = {}) {
  return element("label", attributes, text, select);
}

function selection(name, options, chosen) {
  return element("select", { name }, options.map(([value, text]) =>
    element("option", { value, selected: value === chosen }, text)));
}

function table(label, headings, rows) {
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    element("table", { class: "cards" }, element("thead", {}, element("tr", {}, headings.map((text) =>
      element("th", { scope: "col" }, text)))),
    element("tbody", {}, rows.map(([first, ...rest]) => element("tr", {}, element("th", { scope: "row" }, first),
      rest.map((cell, at) => element("td", { class: "long", "data-label": headings[at + 1] }, cell)))))));
}

function failed(error) {
  document.getElementById("found").replaceChildren(element("p", { class: "warning" }, error.message));
}
