// One leaf: what it is, its picture with the plane that one chooses, its shards, its values.

/** A name for a dimension: the caller's, or its number, with its size. */
function dimensionText(kind, d) {
  const name = kind.dimensions ? `${kind.dimensions[d]}, ` : "";
  return `${d} (${name}${numberText(kind.shape[d])})`;
}

class LeafView {
  constructor(leaves, page, list) {
    this.leaves = leaves;
    this.page = page;
    this.list = list;
    this.element = make("section", { class: "detail", id: "detail", "aria-label": "Leaf", tabindex: 0 });
    this.overview();
  }

  /** What one sees before a leaf is chosen. */
  overview() {
    this.leaf = undefined;
    this.element.replaceChildren(...overviewOf(this.leaves, this.list.tree, (leaf) => this.list.goTo(leaf)));
  }

  /** Draw the leaf anew, where one is chosen. */
  again() {
    if (this.leaf !== undefined) this.show(this.leaf);
  }

  show(leaf) {
    if (leaf !== this.leaf) this.element.scrollTop = 0;
    this.leaf = leaf;
    this.kind = this.leaves.kind(leaf);
    const name = this.leaves.names[leaf] || "the root";
    const back = make("button", { type: "button", id: "overview", class: "back", click: () => this.overview() }, "Overview");
    this.element.replaceChildren(back, make("h2", { id: "leaf-name" }, name), this.facts());
    if (this.kind.kind === "tensor") this.showTensor();
    else this.element.append(make("h3", {}, "Value"), this.valueOf(leaf));
    say(`${name}: ${this.kind.dtype} ${shapeText(this.kind.shape)}`);
  }

  facts() {
    const { kind } = this;
    const shared = this.leaves.shared(this.leaf);
    const first = kind.arrays?.[0];
    return factsOf([
      ["Dtype", kind.dtype], ["Shape", shapeText(kind.shape)], ["Size", kind.bytes ? bytesText(kind.bytes) : ""],
      ["Layout", kind.layout === "pieces" ? `${counted(kind.arrays.length, "piece")}` : kind.layout ?? "manifest"],
      ["Chunks", kind.chunks ? `${numberText(kind.chunks)}${this.chunkText()}` : ""],
      ["Zarr shard", first?.shard ? shapeText(first.shard) : ""], ["Sharding", kind.sharding ?? ""], ["Annotation", kind.annotation ?? ""],
      ["Shared", shared ? `${bytesText(shared)} with other checkpoints` : ""],
    ]);
  }

  /** " of [8, 32]", where all chunks are cut alike. */
  chunkText() {
    const shapes = new Set(this.kind.arrays.map((array) => shapeText(array.chunk)));
    if (shapes.size !== 1 || !this.kind.shape?.length) return shapes.size > 1 ? " of several shapes" : "";
    return ` of ${[...shapes][0]}`;
  }

  /** A Python value: of the manifest, or read when one asks for it. */
  valueOf(leaf) {
    const value = this.leaves.value(leaf);
    if (value !== undefined) return make("pre", { id: "value" }, value);
    if (!this.page.served) return make("p", { class: "note", id: "value" }, "It is stored as bytes, which a served page shows.");
    const shown = make("div", { id: "value" });
    const button = make("button", { type: "button", id: "read-text", click: () => showText(shown, leaf) }, "Read it");
    return make("div", {}, make("p", {}, button), shown);
  }

  showTensor() {
    const { kind } = this;
    if (kind.shape.includes(0)) {
      this.element.append(make("p", { class: "note" }, "It has no elements, so no chunks."));
      return;
    }
    this.cuts = this.leaves.cuts(kind);
    this.mesh = this.leaves.mesh(kind);
    this.plane = firstPlane(kind, this.cuts);
    this.figure = make("figure", { id: "figure" });
    this.element.append(make("h3", {}, "Shards and chunks"), this.controls(), this.figure);
    this.paint();
    const readers = this.plan?.readers(this.leaf);
    if (readers) this.element.append(readers);
    if (this.page.served) this.element.append(make("h3", {}, "Values"), this.valueControls());
  }

  controls() {
    const { kind, plane } = this;
    const controls = make("div", { class: "controls" });
    if (kind.shape.length < 2) return controls;
    const choice = (id, label, chosen, change) => {
      const options = kind.shape.map((_, d) => make("option", { value: d, selected: d === chosen }, dimensionText(kind, d)));
      return make("label", {}, label, make("select", { id, change: (event) => change(Number(event.target.value)) }, options));
    };
    controls.append(choice("down", "Down", plane.down, (d) => this.turn("down", d)), choice("across", "Across", plane.across, (d) => this.turn("across", d)));
    kind.shape.forEach((size, d) => {
      if (d !== plane.down && d !== plane.across && size > 1) controls.append(this.slider(d, size));
    });
    return controls;
  }

  slider(d, size) {
    const label = `At ${dimensionText(this.kind, d)}`;
    const limits = { min: 0, max: size - 1, step: 1, value: this.plane.at[d] };
    const move = (from, to) => {
      const at = Math.round(Number(from.value));
      if (from.value === "" || !(at >= 0 && at < size)) return;
      this.plane.at[d] = at;
      to.value = at;
      this.paint();
    };
    const slider = make("input", { type: "range", ...limits, "data-dimension": d, input: () => move(slider, typed) });
    const typed = make("input", { type: "number", ...limits, "aria-label": `${label}, typed`, input: () => move(typed, slider) });
    return make("div", { class: "at" }, make("label", {}, label, slider), typed);
  }

  /** Look along another dimension; the one that was there takes its place. */
  turn(which, d) {
    const other = which === "down" ? "across" : "down";
    if (this.plane[other] === d) this.plane[other] = this.plane[which];
    this.plane[which] = d;
    const controls = this.element.querySelector(".controls");
    controls.replaceWith(this.controls());
    found(which).focus();
    this.paint();
  }

  paint() {
    const { kind, plane, figure } = this;
    const name = this.leaves.names[this.leaf] || "the root";
    const label = `${name}: ${counted(kind.chunks, "chunk")} in ${counted(kind.arrays.length, "array")}`;
    const { svg, inner, notes, shards } = pictureOf(kind, this.cuts, this.mesh, plane, label, this.plan?.targets(this.leaf) ?? null);
    this.inner = inner;
    const legend = this.mesh
      ? "Colour and number: the device that held a shard; hatched: several hold it. "
      : "Which devices held it is not known. ";
    const blue = this.plan?.targets(this.leaf) ? " Blue frames: what a rank of the plan wants." : "";
    const lines = `Thick lines: zarr arrays; dashed: chunks.${blue}`;
    figure.replaceChildren(svg, make("figcaption", {}, legend + lines, notes.length ? ` Note: ${notes.join("; ")}.` : ""));
    if (shards.length) figure.append(this.shardTable(shards));
  }

  shardTable(shards) {
    const most = 500;
    const item = kindItem(this.kind);
    const rows = shards.slice(0, most).map((shard) => {
      const elements = shard.box.size.reduce((product, size) => product * size, 1);
      const who = shard.devices.length === 1 ? deviceText(shard.devices[0], this.mesh) : devicesText(shard.devices);
      return [boxText(shard.box), who, bytesText(elements * item)];
    });
    const table = tableOf(["Shard", "Held by", "Size"], rows, [2], { id: "shards" });
    table.tBodies[0].querySelectorAll("tr").forEach((row, at) => {
      row.addEventListener("pointerenter", () => this.highlight(shards[at].box));
      row.addEventListener("pointerleave", () => this.highlight(null));
      row.tabIndex = 0;
      row.addEventListener("focus", () => this.highlight(shards[at].box));
      row.addEventListener("blur", () => this.highlight(null));
    });
    const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Shards in this plane" }, table);
    return make("div", {}, make("h3", {}, `${this.kind.shape.length < 3 ? "Shards" : "Shards in this plane"}: ${numberText(shards.length)}`), scroll);
  }

  highlight(box) {
    this.inner.querySelector(".highlit")?.remove();
    if (box) this.inner.append(rectangle(this.plane.of(box), "highlit"));
  }

  valueControls() {
    const shown = make("div", { id: "values", "aria-live": "off" });
    const button = make("button", { type: "button", id: "read", click: () => showValues(shown, this.leaf, this.plane) }, this.kind.shape.length < 2 ? "Read the values" : "Read this plane");
    return make("div", {}, make("p", {}, button), shown);
  }
}

/** Bytes of an element. */
function kindItem(kind) {
  const elements = kind.shape.reduce((product, size) => product * size, 1);
  return elements ? kind.bytes / elements : 0;
}
