// What the site's own search finds: node search.js SITE < queries.json > results.json
// Sphinx's scripts run as they are; of the page they want only a place for their progress.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const site = process.argv[2];
const element = { classList: { add() {} }, replaceChildren() {}, lastChild: null, dataset: {} };
const context = vm.createContext({
  document: {
    getElementById: () => element,
    querySelector: () => null,
    querySelectorAll: () => [],
    addEventListener() {},
    documentElement: element,
    readyState: "complete",
  },
  addEventListener() {},
  location: {},
  localStorage: { setItem() {}, getItem: () => null },
  DOCUMENTATION_OPTIONS: {},
  _ready() {},
  _: (text) => text,
  SPHINX_HIGHLIGHT_ENABLED: false,
  console,
  URLSearchParams,
});
context.window = context;
for (const file of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"]) {
  vm.runInContext(fs.readFileSync(path.join(site, file), "utf-8"), context);
}
const queries = JSON.parse(fs.readFileSync(0, "utf-8"));
context.queries = queries;
const found = vm.runInContext(
  "queries.map((q) => Search._performSearch(...Search._parseQuery(q)).reverse().map((r) => r[0]))",
  context,
);
console.log(JSON.stringify(found));
