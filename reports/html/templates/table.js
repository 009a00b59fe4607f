/* A table of many rows: sorted by any column, a page of them in the document at a time, each built when it is shown. */

const PAGE_ROWS = 100;
const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

/* What is not there comes last, whichever way the rest is sorted. */
function compareValues(one, other, direction) {
  const missing = (value) => value === null || value === undefined || value === "";
  if (missing(one) || missing(other)) return missing(one) - missing(other);
  const order = typeof one === "number" && typeof other === "number" ? one - other : collator.compare(one, other);
  return order * direction;
}

class RowTable {
  /* columns: {title, value(row), cell(row), isNumber, isName}; open(row): the content below a row, or null for none. */
  constructor(root, { label, noun, columns, open }) {
    Object.assign(this, { noun, columns, open, rows: [], sorted: [], page: 0, column: null, direction: 1 });
    this.opened = new Set();
    this.heads = columns.map((column, index) => element("th", { scope: "col", class: column.isNumber ? "number" : "" },
      element("button", { type: "button", onclick: () => this.sortBy(index) }, column.title)));
    this.body = element("tbody");
    this.said = element("span", { role: "status" });
    this.back = element("button", { type: "button", onclick: () => this.turn(-1) }, "Previous");
    this.forth = element("button", { type: "button", onclick: () => this.turn(1) }, "Next");
    root.append(
      element("div", { class: "pager" }, this.said, this.back, this.forth),
      element("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" },
        element("table", { class: "rows" },
          element("thead", {}, element("tr", {}, open ? element("td", {}) : null, this.heads)), this.body)),
    );
  }

  show(rows) {
    this.rows = rows;
    this.page = 0;
    this.sort();
  }

  sortBy(index) {
    this.direction = this.column === index ? -this.direction : 1;
    this.column = index;
    this.page = 0;
    this.heads.forEach((head, other) => {
      if (other === index) head.setAttribute("aria-sort", this.direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    this.sort();
  }

  sort() {
    this.sorted = this.rows.slice();
    if (this.column !== null) {
      const { value } = this.columns[this.column];
      const keyed = this.sorted.map((row) => [value(row), row]);
      keyed.sort(([one], [other]) => compareValues(one, other, this.direction));
      this.sorted = keyed.map(([, row]) => row);
    }
    this.draw();
  }

  turn(pages) {
    this.page += pages;
    this.draw();
  }

  draw() {
    const from = this.page * PAGE_ROWS;
    const shown = this.sorted.slice(from, from + PAGE_ROWS);
    this.body.replaceChildren(...shown.flatMap((row) => this.lines(row)));
    const count = this.sorted.length.toLocaleString("en");
    const range = `${(from + 1).toLocaleString("en")}\u2013${(from + shown.length).toLocaleString("en")} of `;
    this.said.textContent = shown.length === this.sorted.length
      ? `${count} ${this.noun}${this.sorted.length === 1 ? "" : "s"}` : `${range}${count} ${this.noun}s`;
    this.back.hidden = this.forth.hidden = this.sorted.length <= PAGE_ROWS;
    this.back.disabled = this.page === 0;
    this.forth.disabled = from + shown.length >= this.sorted.length;
  }

  lines(row) {
    const cells = this.columns.map((column) => element(column.isName ? "th" : "td",
      { class: column.isNumber ? "number" : column.style, scope: column.isName ? "row" : null }, column.cell(row)));
    if (!this.open) return [element("tr", { class: "row" }, cells)];
    const isOpen = this.opened.has(row);
    const button = element("button", { type: "button", class: "open", "aria-expanded": String(isOpen),
      "aria-label": `Details of ${row.title}` });
    const line = element("tr", { class: "row" }, element("td", {}, button), cells);
    const toggle = () => this.toggle(row, line, button);
    line.addEventListener("click", (event) => {
      const isSelecting = String(document.getSelection()) !== "";
      if (event.target === button || !(isSelecting || event.target.closest("a, button"))) toggle();
    });
    return isOpen ? [line, this.below(row)] : [line];
  }

  toggle(row, line, button) {
    if (this.opened.delete(row)) line.nextElementSibling.remove();
    else {
      this.opened.add(row);
      line.after(this.below(row));
    }
    button.setAttribute("aria-expanded", String(this.opened.has(row)));
  }

  below(row) {
    return element("tr", { class: "drill" }, element("td", { colspan: this.columns.length + 1 },
      element("div", {}, this.open(row))));
  }
}
