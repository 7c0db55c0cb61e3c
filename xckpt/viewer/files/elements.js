// Elements are made here alone: texts of a checkpoint become text nodes or attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Set attributes; functions are listeners, and null, undefined or false are left out. */
function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : String(value));
  }
  return element;
}

/** An HTML element with attributes and children (elements or texts). */
function make(tag, attributes = {}, ...children) {
  const element = setAll(document.createElement(tag), attributes);
  element.append(...children.flat());
  return element;
}

/** The same for SVG. */
function draw(tag, attributes = {}, ...children) {
  const element = setAll(document.createElementNS(SVG, tag), attributes);
  element.append(...children.flat());
  return element;
}

const found = (id) => document.getElementById(id);

/** What this page shows. */
const pageShown = JSON.parse(found("page").textContent);

/** Say something to screen readers. */
function say(text) {
  found("said").textContent = text;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes in words: 1536 is "1.5 KiB". */
function bytesText(count) {
  let unit = 0;
  let size = count;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${count} B` : `${size.toFixed(1)} ${UNITS[unit]}`;
}

const whole = new Intl.NumberFormat("en-US");

/** A number with its thousands told apart. */
function numberText(count) {
  return whole.format(count);
}

/** A number and its noun: "1 chunk", "1,000 chunks". */
function counted(count, noun) {
  return `${numberText(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** "1 leaf", "1,000 leaves" */
function leavesText(count) {
  return count === 1 ? "1 leaf" : `${numberText(count)} leaves`;
}

/** What went wrong, for everybody to notice. */
function problem(error) {
  return make("p", { class: "problem", role: "alert" }, error.message);
}

/** A bar for a part of 1; the number that it draws stands beside it. */
function partBar(part) {
  return draw("svg", { class: "part", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    draw("rect", { class: "barfill", x: 0, y: 0, width: Math.max(part > 0 ? 0.5 : 0, part * 100), height: 10 }));
}

/** The name of a leaf, to press. */
function leafButton(name, onPress) {
  return make("button", { type: "button", class: "link", click: onPress }, name || "the root");
}

/** A number short enough to read. */
function shortText(number, digits = 6) {
  const size = Math.abs(number);
  // Number's own text has exponents from 1e-7 and 1e21 on: too late for a label.
  if (number && (size < 1e-4 || size >= 1e12)) return number.toExponential(digits - 1).replace(/\.?0*e/, "e").replace("e+", "e");
  return Number(number.toPrecision(digits)).toString();
}

/** A table of texts and elements, with the columns that hold numbers. */
function tableOf(heads, rows, numbers = [], attributes = {}) {
  const kind = (at) => (numbers.includes(at) ? "number" : null);
  const head = make("tr", {}, heads.map((text, at) => make("th", { scope: "col", class: kind(at) }, text)));
  const body = rows.map((cells) =>
    make("tr", {}, cells.map((cell, at) => make("td", { class: kind(at) }, cell))));
  return make("table", attributes, make("thead", {}, head), make("tbody", {}, body));
}

/** A list of terms and what they are; entries without text are left out. */
function factsOf(entries) {
  const shown = entries.filter(([, text]) => text !== "" && text !== null && text !== undefined);
  return make("dl", {}, shown.flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)]));
}
