// The list of leaves: a tree in the saved order, or what a search finds, sorted. Only the rows that
// can be seen are in the document; the keyboard moves an active row, which is always among them.

const ROW = 26;
const COLUMNS = [
  ["name", "Name"], ["dtype", "Dtype"], ["shape", "Shape"], ["bytes", "Size"], ["chunks", "Chunks"], ["sharding", "Sharding"],
];
// Only where files are shared with other checkpoints.
const SHARED = ["shared", "Shared"];
// Only where a sharding is known of some leaf.
const SHARDING = "sharding";
const NUMBERS = ["bytes", "chunks", "shared"];

/** A shape in words. */
function shapeText(shape) {
  return shape ? `[${shape.join(", ")}]` : "";
}

/** A sharding as short as a column is: "data, model" of "PartitionSpec(data, model) on ...", and "S(0), R" of
 * "Shard(dim=0), Replicate() on ...", as torch itself shortens it; "whole" where nothing is cut. */
function shardingText(sharding) {
  const spec = /^PartitionSpec\((.*?)\) on /.exec(sharding);
  if (spec) return /[^-, ]/.test(spec[1]) ? spec[1] : "whole";
  const placements = /^(_?(?:StridedShard|Shard|Replicate|Partial)\(.*\)) on /.exec(sharding);
  if (!placements) return sharding;
  const short = placements[1].replace(/(_?)(?:Strided)?Shard\(dim=(\d+)(?:, sf=(\d+))?\)/g, (_, mark, dim, of) => `${mark}S(${dim}${of ? `, ${of}` : ""})`).replaceAll("Replicate()", "R");
  return /[^R, ]/.test(short) ? short : "whole";
}

const CHARACTER = 8.6;

/** The end of a name that is longer than so many pixels: it tells more than the beginning. */
function endOf(name, room) {
  const shown = Math.max(12, Math.floor(room / CHARACTER) - 3);
  return name.length > shown ? `…${name.slice(1 - shown)}` : name;
}

class LeafList {
  constructor(leaves, onChoose) {
    this.leaves = leaves;
    this.tree = new Tree(leaves);
    this.onChoose = onChoose;
    const isCut = leaves.page.kinds.some((kind) => kind.sharding);
    const columns = isCut ? COLUMNS : COLUMNS.filter(([column]) => column !== SHARDING);
    this.columns = leaves.page.shared ? [...columns, SHARED] : columns;
    this.numbered = this.columns.map(([column]) => NUMBERS.includes(column));
    this.rowClass = `row${leaves.page.shared ? " seven" : ""}${isCut ? "" : " uncut"}`;
    this.query = "";
    this.column = null;
    this.descending = false;
    this.active = 0;
    this.chosen = null;
    this.element = this.build();
    this.refresh();
  }

  build() {
    this.search = make("input", { type: "search", id: "search", placeholder: "name, dtype or layout ( / )", "aria-label": "Search leaves", autocomplete: "off", spellcheck: "false", input: () => this.find(this.search.value), keydown: (event) => this.leaveSearch(event) });
    this.hits = make("span", { class: "note", id: "hits" });
    this.heads = this.columns.map(([column, title]) => this.head(column, title));
    this.body = make("div", { role: "rowgroup" });
    this.empty = make("p", { class: "note nothing", id: "nothing" });
    this.space = make("div", { role: "presentation" });
    this.view = make("div", { class: "view", id: "rows", tabindex: 0, role: "treegrid", "aria-label": "Leaves", scroll: () => this.paint(), keydown: (event) => this.key(event), click: (event) => this.click(event) }, this.headRow(), this.space, this.body);
    new ResizeObserver(() => this.paint()).observe(this.view);
    return make("div", { class: "list" }, make("div", { class: "bar" }, this.search, this.hits), make("div", { class: "grid" }, this.visibleHead(), this.empty, this.view));
  }

  /** The heads that people see and press; the grid's own row of heads is for screen readers. */
  visibleHead() {
    return make("div", { class: `${this.rowClass} head`, role: "group", "aria-label": "Sort by" }, this.heads);
  }

  headRow() {
    this.roleHeads = this.columns.map(([, title]) => make("span", { role: "columnheader" }, title));
    return make("div", { role: "rowgroup", class: "unseen" }, make("div", { role: "row", "aria-rowindex": 1 }, this.roleHeads));
  }

  head(column, title) {
    return make("span", { class: NUMBERS.includes(column) ? "number" : null }, make("button", { type: "button", "data-column": column, click: () => this.sort(column) }, title));
  }

  find(text) {
    this.query = text.trim();
    this.refresh();
  }

  /** Once: ascending (numbers: descending); twice: the other way; three times: the saved order. */
  sort(column) {
    const first = NUMBERS.includes(column);
    if (this.column !== column) [this.column, this.descending] = [column, first];
    else if (this.descending === first) this.descending = !first;
    else this.column = null;
    this.heads.forEach((head, at) => {
      const [name, title] = this.columns[at];
      const mark = name !== this.column ? "" : this.descending ? " ▼" : " ▲";
      head.firstChild.textContent = title + mark;
      if (mark) this.roleHeads[at].setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else this.roleHeads[at].removeAttribute("aria-sort");
    });
    this.refresh();
  }

  refresh() {
    const flat = this.query !== "" || this.column !== null;
    if (flat) {
      const leaves = this.leaves.search(this.query);
      const ordered = this.column === null ? leaves : this.leaves.sorted(leaves, this.column, this.descending);
      this.rows = ordered;
      this.hits.textContent = leavesText(ordered.length);
    } else {
      this.rows = this.tree.rows();
      this.hits.textContent = leavesText(this.leaves.count);
    }
    this.active = Math.min(this.active, Math.max(0, this.rows.length - 1));
    this.empty.hidden = this.rows.length > 0;
    this.empty.textContent = this.query ? `No leaf has “${this.query}” in its name, dtype or layout.` : "No leaves.";
    this.space.style.height = `${this.rows.length * ROW}px`;
    this.view.setAttribute("aria-rowcount", this.rows.length + 1);
    if (flat) this.view.scrollTop = 0;
    this.paint();
  }

  paint() {
    this.room = this.heads[0].clientWidth;
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW) - 8);
    const last = Math.min(this.rows.length, first + Math.ceil(this.view.clientHeight / ROW) + 16);
    const shown = [];
    for (let at = first; at < last; at += 1) shown.push(this.row(at));
    if (this.active < first && this.rows.length) shown.unshift(this.row(this.active));
    else if (this.active >= last && this.rows.length) shown.push(this.row(this.active));
    this.body.replaceChildren(...shown);
    if (this.rows.length) this.view.setAttribute("aria-activedescendant", `row-${this.active}`);
    else this.view.removeAttribute("aria-activedescendant");
  }

  /** The node of a row; a search gives bare leaf numbers. */
  node(at) {
    const row = this.rows[at];
    return typeof row === "number" ? { leaf: row, depth: 0, label: this.leaves.names[row], flat: true } : row;
  }

  row(at) {
    const node = this.node(at);
    const isLeaf = node.leaf !== null;
    const chosen = isLeaf && node.leaf === this.chosen;
    const cells = isLeaf ? this.leafCells(node) : this.containerCells(node);
    const row = make("div", {
      class: `${this.rowClass}${at === this.active ? " active" : ""}${isLeaf ? "" : " container"}`, id: `row-${at}`, role: "row", "data-at": at, "data-leaf": isLeaf ? node.leaf : null,
      "aria-rowindex": at + 2, "aria-level": node.depth + 1, "aria-expanded": isLeaf ? null : String(node.open), "aria-selected": String(chosen),
    }, cells.map((text, at) => make("span", { role: "gridcell", class: this.numbered[at] ? "number" : null, title: this.numbered[at] ? null : this.titleOf(node, at, text) }, node.flat && at === 0 ? endOf(text, this.room) : text)));
    row.style.top = `${at * ROW}px`;
    const twist = make("span", { class: "twist", "aria-hidden": "true" }, isLeaf ? "" : node.open ? "▾" : "▸");
    row.firstChild.prepend(twist);
    row.firstChild.style.paddingLeft = `${node.depth}em`;
    return row;
  }

  /** All of what a cell shows the beginning of. */
  titleOf(node, at, text) {
    const isSharding = node.leaf !== null && this.columns[at][0] === SHARDING;
    return isSharding ? (this.leaves.kind(node.leaf).sharding ?? "") : text;
  }

  leafCells(node) {
    const kind = this.leaves.kind(node.leaf);
    const size = kind.bytes ? bytesText(kind.bytes) : "";
    const what = kind.kind === "value" ? this.leaves.value(node.leaf) ?? "" : shapeText(kind.shape);
    const shared = this.leaves.shared(node.leaf);
    return this.inColumns({
      name: node.label || "the root", dtype: kind.dtype, shape: what, bytes: size, chunks: kind.chunks ? numberText(kind.chunks) : "",
      sharding: shardingText(kind.sharding ?? ""), shared: shared ? bytesText(shared) : "",
    });
  }

  containerCells(node) {
    return this.inColumns({
      name: node.label, dtype: node.kind, shape: `${numberText(node.count)} below`, bytes: node.bytes ? bytesText(node.bytes) : "", chunks: node.chunks ? numberText(node.chunks) : "",
      sharding: "", shared: node.shared ? bytesText(node.shared) : "",
    });
  }

  /** The texts of a row, for the columns that there are. */
  inColumns(texts) {
    return this.columns.map(([column]) => texts[column]);
  }

  click(event) {
    const row = event.target.closest("[data-at]");
    if (!row) return;
    this.active = Number(row.dataset.at);
    this.enter();
  }

  /** Choose the active leaf, or open or close the active container. */
  enter() {
    const node = this.node(this.active);
    if (!node) return;
    if (node.leaf === null) this.toggle(node, !node.open);
    else this.choose(node.leaf);
  }

  choose(leaf) {
    this.chosen = leaf;
    this.paint();
    this.onChoose(leaf);
  }

  /** Choose a leaf wherever it lies: a search ends, and its containers open. */
  goTo(leaf) {
    this.search.value = "";
    this.query = "";
    this.tree.reveal(leaf);
    this.refresh();
    this.move(this.rows.findIndex((row) => (typeof row === "number" ? row : row.leaf) === leaf));
    this.choose(leaf);
    this.view.focus();
  }

  toggle(node, open) {
    node.open = open;
    this.refresh();
  }

  move(to) {
    this.active = Math.max(0, Math.min(this.rows.length - 1, to));
    const top = this.active * ROW;
    const { scrollTop, clientHeight } = this.view;
    if (top < scrollTop) this.view.scrollTop = top;
    else if (top + ROW > scrollTop + clientHeight) this.view.scrollTop = top + ROW - clientHeight;
    this.paint();
  }

  key(event) {
    const node = this.node(this.active);
    const page = Math.max(1, Math.floor(this.view.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    if (event.key in moves) this.move(this.active + moves[event.key]);
    else if (event.key === "Home") this.move(0);
    else if (event.key === "End") this.move(this.rows.length - 1);
    else if (event.key === "Enter" || event.key === " ") this.enter();
    else if (event.key === "ArrowRight" && node && node.leaf === null) this.right(node);
    else if (event.key === "ArrowLeft" && node) this.left(node);
    else return;
    event.preventDefault();
  }

  right(node) {
    if (!node.open) this.toggle(node, true);
    else if (node.children.length) this.move(this.active + 1);
  }

  left(node) {
    if (node.leaf === null && node.open) {
      this.toggle(node, false);
      return;
    }
    let at = this.active - 1;
    while (at >= 0 && this.node(at).depth >= node.depth) at -= 1;
    if (at >= 0) this.move(at);
  }

  leaveSearch(event) {
    if (event.key === "Escape") {
      this.search.value = "";
      this.find("");
    } else if (event.key !== "ArrowDown" && event.key !== "Enter") return;
    event.preventDefault();
    this.view.focus();
  }
}
