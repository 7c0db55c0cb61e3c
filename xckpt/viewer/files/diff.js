// What differs between the checkpoint and another.

const KINDS = { missing: "only here", added: "only in the other", content: "other elements" };

/** The panel of a comparison. */
function diffView(diff) {
  const count = new Map();
  for (const each of diff.differences) {
    const [number, bytes] = count.get(each.kind) ?? [0, 0];
    count.set(each.kind, [number + 1, bytes + (each.bytes ?? 0)]);
  }
  const sums = [...count].map(([kind, [number, bytes]]) => [KINDS[kind] ?? `other ${kind}`, numberText(number), bytesText(bytes)]);
  sums.push(["equal", numberText(diff.equal ?? 0), bytesText(diff.equal_bytes ?? 0)]);
  const shown = diff.differences.slice(0, 2000);
  const rows = shown.map((each) => [each.name || (each.kind === "metadata" ? "the metadata" : "the root"), KINDS[each.kind] ?? each.kind, each.first, each.second === each.first ? "" : each.second, each.bytes ? bytesText(each.bytes) : ""]);
  const more = diff.differences.length - shown.length;
  return make("div", {}, factsOf([["Compared with", diff.other]]),
    tableOf(["What", "Leaves", "Size"], sums, [1, 2], { id: "diff-sums" }),
    make("h3", {}, counted(diff.differences.length, "difference")),
    ...(rows.length ? [tableOf(["Leaf", "What", "Here", "There", "Size"], rows, [4], { id: "differences" })] : []),
    ...(more ? [make("p", { class: "note" }, `and ${numberText(more)} more`)] : []));
}
