// The leaves of the page and the tree that their names make.

/** A checkpoint: columns of the page, with what is asked of them. */
class Leaves {
  constructor(page) {
    this.page = page;
    for (const kind of page.kinds) kind.arrays ??= [];
    this.count = page.names.length;
    this.names = page.names;
    this.searched = page.names.map((name) => name.toLowerCase());
    this.all = Array.from(this.names.keys());
    this.last = { text: "", hits: this.all };
    this.order = new Map();
  }

  kind(leaf) {
    return this.page.kinds[this.page.kind[leaf]];
  }

  value(leaf) {
    return (this.page.values ?? {})[leaf];
  }

  shared(leaf) {
    return (this.page.shared ?? {})[leaf] ?? 0;
  }

  mesh(kind) {
    return kind.mesh === undefined ? null : this.page.meshes[kind.mesh];
  }

  /** The cuts of each dimension, or null where no sharding is known. */
  cuts(kind) {
    return kind.cuts ? kind.cuts.map((number) => this.page.cuts[number]) : null;
  }

  total() {
    let bytes = 0;
    let chunks = 0;
    for (const kind of this.page.kind) {
      bytes += this.page.kinds[kind].bytes ?? 0;
      chunks += this.page.kinds[kind].chunks ?? 0;
    }
    return { bytes, chunks };
  }

  /**
   * The numbers of the leaves in whose names, dtypes or layouts all words of a search occur.
   *
   * Who types on looks among what was found before, unless a word has become a dtype or a layout.
   */
  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = words.map((word) => this.page.kinds.map((kind) => kind.dtype === word || kind.layout === word));
    const typedOn = this.last.text && text.startsWith(this.last.text) && !fits.flat().includes(true);
    let hits = typedOn ? this.last.hits : this.all;
    words.forEach((word, at) => {
      hits = hits.filter((leaf) => fits[at][this.page.kind[leaf]] || this.searched[leaf].includes(word));
    });
    this.last = { text, hits };
    return hits;
  }

  /** What a column shows of a leaf, to sort by. */
  sortable(column) {
    const of = {
      name: (leaf) => this.names[leaf],
      dtype: (leaf) => this.kind(leaf).dtype,
      shape: (leaf) => (this.kind(leaf).shape ?? []).reduce((product, size) => product * size, 1),
      bytes: (leaf) => this.kind(leaf).bytes ?? 0,
      chunks: (leaf) => this.kind(leaf).chunks ?? 0,
      sharding: (leaf) => shardingText(this.kind(leaf).sharding ?? ""),
      shared: (leaf) => this.shared(leaf),
    };
    return of[column];
  }

  /** Leaves in the order of a column: computed once for all of them, then picked. */
  sorted(leaves, column, descending) {
    if (!this.order.has(column)) {
      const key = this.sortable(column);
      const keys = Array.from({ length: this.count }, (_, leaf) => key(leaf));
      const numbers = Uint32Array.from(keys.keys());
      numbers.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
      const rank = new Uint32Array(this.count);
      numbers.forEach((leaf, at) => (rank[leaf] = at));
      this.order.set(column, rank);
    }
    const rank = this.order.get(column);
    const ordered = Uint32Array.from(leaves);
    ordered.sort(descending ? (a, b) => rank[b] - rank[a] : (a, b) => rank[a] - rank[b]);
    return Array.from(ordered);
  }
}

/** The tree of names: nodes in the saved order, each with what lies below it. */
class Tree {
  constructor(leaves) {
    this.leaves = leaves;
    this.root = this.node("", "", -1);
    const known = new Map([["", this.root]]);
    this.known = known;
    const containers = leaves.page.containers ?? {};
    const below = (name) => {
      let node = known.get(name);
      if (node) return node;
      const cut = name.lastIndexOf("/");
      const parent = below(cut < 0 ? "" : name.slice(0, cut));
      node = this.node(name, name.slice(cut + 1), parent.depth + 1);
      node.kind = containers[name] ?? "dict";
      parent.children.push(node);
      known.set(name, node);
      return node;
    };
    for (let leaf = 0; leaf < leaves.count; leaf += 1) {
      const name = leaves.names[leaf];
      const cut = name.lastIndexOf("/");
      const parent = below(cut < 0 ? "" : name.slice(0, cut));
      parent.children.push({ leaf, depth: parent.depth + 1, label: name.slice(cut + 1) });
    }
    for (const name of Object.keys(containers)) if (name) below(name);
    this.sum(this.root);
    this.openSome();
  }

  node(name, label, depth) {
    return { leaf: null, name, label, depth, kind: "dict", children: [], open: false, bytes: 0, chunks: 0, shared: 0, count: 0 };
  }

  sum(node) {
    for (const child of node.children) {
      if (child.leaf === null) this.sum(child);
      const kind = child.leaf === null ? child : this.leaves.kind(child.leaf);
      node.bytes += kind.bytes ?? 0;
      node.chunks += kind.chunks ?? 0;
      node.shared += child.leaf === null ? child.shared : this.leaves.shared(child.leaf);
      node.count += child.leaf === null ? child.count : 1;
    }
  }

  /** Open containers, the outer ones first, for as long as the rows are few. */
  openSome(most = 200) {
    this.root.open = true;
    let rows = this.root.children.length;
    let level = this.root.children;
    while (level.length) {
      const next = [];
      for (const node of level) {
        if (node.leaf !== null || rows + node.children.length > most) continue;
        node.open = true;
        rows += node.children.length;
        next.push(...node.children);
      }
      level = next;
    }
  }

  /** Open all containers that a leaf lies in. */
  reveal(leaf) {
    let name = this.leaves.names[leaf];
    for (let cut = name.lastIndexOf("/"); cut >= 0; cut = name.lastIndexOf("/")) {
      name = name.slice(0, cut);
      this.known.get(name).open = true;
    }
  }

  /** The nodes that are to be seen, top to bottom. */
  rows() {
    const rows = [];
    const walk = (node) => {
      for (const child of node.children) {
        rows.push(child);
        if (child.leaf === null && child.open) walk(child);
      }
    };
    walk(this.root);
    return rows;
  }
}
