"use strict";
const all = (what, within = document) => [...within.querySelectorAll(what)];
const make = (tag, text, parent, attributes = {}) => {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
};
const number = (cell) => {
  if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
  const text = cell.textContent.trim().replaceAll(",", "").replace("−", "-");
  return text === "" ? NaN : Number(text);
};

/* One tip for all charts, read aloud when a key moves it. */
const tip = make("div", "", document.body, { id: "tip", role: "status" });
tip.hidden = true;
const hideTip = () => { tip.hidden = true; all(".cross").forEach((line) => { line.hidden = true; }); };
const showTip = (row, left, top) => {
  const heads = row.closest("table").tHead.rows[0].cells;
  tip.replaceChildren();
  [...row.cells].forEach((cell, at) => {
    if (heads[at].classList.contains("off") || ["", "-"].includes(cell.textContent.trim())) return;
    const line = make("div", "", tip);
    make("span", heads[at].dataset.label, line);
    make("b", cell.textContent, line);
  });
  tip.hidden = false;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(left + 14, room)) + scrollX}px`;
  tip.style.top = `${Math.max(8, top - tip.offsetHeight - 10) + scrollY}px`;
};
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

/* Charts: the row of the chart's table that is nearest to the pointer, or chosen by arrow keys. */
for (const plot of all(".plot[data-table]")) {
  const first = Number(plot.dataset.first || 0);
  const rows = all("tbody tr", document.getElementById(plot.dataset.table))
    .slice(first, first + Number(plot.dataset.rows));
  const places = rows.map((row) => Number(row.dataset.x));
  const area = plot.querySelector(".area"), cross = plot.querySelector(".cross");
  let chosen = -1;
  const choose = (at) => {
    chosen = Math.max(0, Math.min(rows.length - 1, at));
    const box = area.getBoundingClientRect();
    cross.style.left = `${places[chosen]}%`;
    all(".cross").forEach((line) => { line.hidden = line !== cross; });
    showTip(rows[chosen], box.left + box.width * places[chosen] / 100, box.top + 20);
  };
  if (!rows.length) continue;
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect(), place = 100 * (event.clientX - box.left) / box.width;
    let best = 0;
    places.forEach((at, index) => { if (Math.abs(at - place) < Math.abs(places[best] - place)) best = index; });
    choose(best);
  });
  area.addEventListener("pointerleave", hideTip);
  area.addEventListener("blur", hideTip);
  area.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: rows.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); choose(to); }
  });
}

/* Cells of a heat map: the row of the main table about the same experiment. */
const main = all("table.main tbody tr");
for (const cell of all("td[data-row]")) {
  cell.addEventListener("pointerenter", () => {
    const box = cell.getBoundingClientRect();
    showTip(main[Number(cell.dataset.row)], box.left, box.top);
  });
  cell.addEventListener("pointerleave", hideTip);
}

/* Copies. A spreadsheet reads no cell as a formula; Markdown has no active character. */
const headOf = (table) => [...table.tHead.rows[0].cells];
const shownRows = (table) => [...table.tBodies[0].rows].filter((row) => !row.hidden && !row.classList.contains("off"));
const csvCell = (text) => {
  const inert = /^\s*[=+\-@]|^[\t\r\n]/.test(text) && (text.trim() === "" || isNaN(text)) ? `'${text}` : text;
  return /[",\r\n]/.test(inert) ? `"${inert.replaceAll('"', '""')}"` : inert;
};
const asCsv = (table) => {
  const head = headOf(table).map((cell) => cell.dataset.label + (cell.dataset.unit ? ` (${cell.dataset.unit})` : ""));
  const value = (cell) => (isNaN(number(cell)) ? cell.textContent.trim() : String(number(cell)));
  return [head, ...shownRows(table).map((row) => [...row.cells].map(value))]
    .map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
};
const markdownCell = (text) => text.trim().replace(/\s+/g, " ").replace(/[\\`*<|\[\]~&_]|:(?=\/\/)/g, "\\$&");
const asMarkdown = (table) => {
  const head = headOf(table);
  const line = (cells) => `| ${cells.join(" | ")} |\n`;
  return line(head.map((cell) => markdownCell(cell.dataset.label)))
    + line(head.map((cell) => (cell.classList.contains("number") ? "---:" : "---")))
    + shownRows(table).map((row) => line([...row.cells].map((cell) => markdownCell(cell.textContent)))).join("");
};
const copy = async (text, button) => {
  let done = false;
  try { await navigator.clipboard.writeText(text); done = true; } catch {
    const area = make("textarea", text, document.body);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.textContent;
  button.textContent = done ? "Copied" : "Not allowed here";
  setTimeout(() => { button.textContent = label; }, 1500);
};

/* Tables: sorted by a click on a heading, filtered by words. */
for (const table of all("table.data")) {
  const body = table.tBodies[0], tools = document.querySelector(`[data-tools="${table.id}"]`);
  headOf(table).forEach((head, at) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      headOf(table).forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const isNumber = head.classList.contains("number");
      const keyed = [...body.rows].map((row) => {
        const cell = row.cells[at];
        return { row, key: isNumber ? number(cell) : cell.textContent.trim() };
      });
      const unknown = (key) => key === "" || key === "-" || Number.isNaN(key);
      keyed.sort((a, b) => {
        if (unknown(a.key) || unknown(b.key)) return unknown(a.key) - unknown(b.key);
        const order = isNumber ? a.key - b.key : a.key.localeCompare(b.key, "en", { numeric: true });
        return up ? order : -order;
      });
      body.append(...keyed.map((each) => each.row));
    });
  });
  if (!tools) continue;
  const filter = tools.querySelector("input"), count = tools.querySelector("output");
  if (filter) filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of body.rows) {
      const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    count.textContent = words.length ? `${shownRows(table).length} of ${body.rows.length} rows` : "";
  });
  for (const [name, text] of [["csv", asCsv], ["markdown", asMarkdown]]) {
    const button = tools.querySelector(`[data-copy="${name}"]`);
    button.addEventListener("click", () => copy(text(table), button));
  }
}

/* Switches: one of several views, and which series are shown everywhere. */
for (const input of all("input[data-view]")) {
  const show = () => {
    for (const view of all(`[data-views="${input.name}"] > [data-of-view]`)) {
      view.hidden = view.dataset.ofView !== input.dataset.view;
    }
  };
  input.addEventListener("change", show);
  if (input.checked) show();
}
for (const input of all("input[data-series]")) {
  const show = () => {
    for (const part of all(`[data-of="${input.dataset.series}"]`)) {
      part.classList.toggle("off", !input.checked);
      if (part.tagName !== "TH") continue;
      for (const row of part.closest("table").tBodies[0].rows) {
        row.cells[part.cellIndex].classList.toggle("off", !input.checked);
      }
    }
  };
  input.addEventListener("change", show);
  if (!input.checked) show();
}
document.documentElement.classList.add("live");
