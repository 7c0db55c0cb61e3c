// What a checkpoint is made of, before one chooses a leaf: where the bytes are, and how they were cut.

const MOST_PARTS = 12;
const MOST_LARGEST = 8;

/** A table of parts with their bytes and bars; the last row sums up those beyond `MOST_PARTS`. */
function partsTable(head, parts, id) {
  const sorted = parts.toSorted((a, b) => b.bytes - a.bytes);
  const shown = sorted.slice(0, MOST_PARTS);
  const rest = sorted.slice(MOST_PARTS);
  const add = (all, name) => all.reduce((sum, each) => sum + each[name], 0);
  if (rest.length) shown.push({ label: `${numberText(rest.length)} more`, count: add(rest, "count"), bytes: add(rest, "bytes") });
  const all = Math.max(1, add(parts, "bytes"));
  const rows = shown.map((each) => [each.label, numberText(each.count), bytesText(each.bytes), partBar(each.bytes / all)]);
  return tableOf([head, "Leaves", "Size", "Share"], rows, [1, 2], { id, class: "parts" });
}

const MOST_PART = 0.9;

/** What lies below the root; a container with nearly all bytes is replaced by what lies below it. */
function containerParts(tree) {
  let children = tree.root.children;
  const large = (child) => child.leaf === null && child.bytes > 0 && child.bytes >= MOST_PART * tree.root.bytes && child.children.length > 0;
  for (let at = children.findIndex(large); at >= 0; at = children.findIndex(large))
    children = [...children.slice(0, at), ...children[at].children, ...children.slice(at + 1)];
  return children.map((child) => {
    if (child.leaf === null) return { label: child.name, count: child.count, bytes: child.bytes };
    return { label: tree.leaves.names[child.leaf] || "the root", count: 1, bytes: tree.leaves.kind(child.leaf).bytes ?? 0 };
  });
}

/** Leaves summed up by a text of their kind. */
function kindParts(leaves, textOf) {
  const parts = new Map();
  for (let leaf = 0; leaf < leaves.count; leaf += 1) {
    const kind = leaves.kind(leaf);
    const label = textOf(kind);
    const part = parts.get(label) ?? { label, count: 0, bytes: 0 };
    part.count += 1;
    part.bytes += kind.bytes ?? 0;
    parts.set(label, part);
  }
  return [...parts.values()];
}

/** The leaves with most bytes: of the largest kinds, for there are few, as many as are shown. */
function largestLeaves(leaves) {
  const { kinds, kind } = leaves.page;
  const bytes = (number) => kinds[number].bytes ?? 0;
  const count = new Uint32Array(kinds.length);
  for (const number of kind) count[number] += 1;
  const chosen = new Set();
  let found = 0;
  for (const number of Array.from(kinds.keys()).sort((a, b) => bytes(b) - bytes(a))) {
    if (found >= MOST_LARGEST || !bytes(number)) break;
    chosen.add(number);
    found += count[number];
  }
  const largest = leaves.all.filter((leaf) => chosen.has(kind[leaf]));
  return largest.sort((a, b) => bytes(kind[b]) - bytes(kind[a]) || a - b).slice(0, MOST_LARGEST);
}

/** The panel beside the list while no leaf is chosen. */
function overviewOf(leaves, tree, onChoose) {
  if (!leaves.count) return [make("h2", {}, "Nothing is in it"), make("p", { class: "note" }, "This checkpoint holds no leaves.")];
  const largest = largestLeaves(leaves);
  const all = Math.max(1, leaves.total().bytes);
  const rows = largest.map((leaf) => [leafButton(leaves.names[leaf], () => onChoose(leaf)), shapeText(leaves.kind(leaf).shape), bytesText(leaves.kind(leaf).bytes), partBar(leaves.kind(leaf).bytes / all)]);
  const parts = containerParts(tree);
  const cut = kindParts(leaves, (kind) => kind.sharding || (kind.kind === "value" ? "a value" : "not known, or whole"));
  return [
    make("h2", {}, "Where the bytes are"),
    make("p", { class: "note" }, "Choose a leaf to see its shards and chunks. Press ? for the keys."),
    ...(parts.length > 1 ? [partsTable("Part", parts, "parts-containers")] : []),
    make("h3", {}, "By dtype"), partsTable("Dtype", kindParts(leaves, (kind) => kind.dtype), "parts-dtypes"),
    make("h3", {}, "By the sharding that wrote it"), partsTable("Sharding", cut, "parts-shardings"),
    ...(rows.length ? [make("h3", {}, "Largest leaves"), tableOf(["Leaf", "Shape", "Size", "Share"], rows, [2], { id: "largest", class: "parts" })] : []),
  ];
}
