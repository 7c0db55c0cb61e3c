// What differs between the checkpoint and another, which one may type in a served page.

const KINDS = { missing: "only here", added: "only in the other", content: "other elements" };
const MOST_DIFFERENCES = 2000;

/** A kind of difference in words. */
const kindText = (kind) => KINDS[kind] ?? `other ${kind}`;

class DiffView {
  constructor(leaves, page, goTo) {
    this.numbers = new Map();
    this.leaves = leaves;
    this.page = page;
    this.goTo = goTo;
    this.result = make("div", { id: "diff" });
    this.element = make("div", {}, ...(page.served ? [this.form()] : []), this.result);
    if (page.diff) this.show(page.diff);
    else this.result.append(make("p", { class: "note" }, "Nothing is compared yet. Contents are compared by their digests where both are cut alike; elsewhere both are read."));
  }

  form() {
    const beside = this.page.beside ?? [];
    const options = make("datalist", { id: "beside" }, beside.map((path) => make("option", { value: path })));
    this.other = make("input", { type: "text", id: "diff-other", list: "beside", placeholder: "path or URL of another checkpoint", autocomplete: "off", spellcheck: "false", value: this.page.diff?.other ?? beside.at(-1) ?? null });
    const button = make("button", { id: "diff-it" }, "Compare");
    return make("form", { class: "bar asked", submit: (event) => this.ask(event) }, make("label", { for: "diff-other" }, "Compare with"), this.other, options, button);
  }

  async ask(event) {
    event.preventDefault();
    this.result.replaceChildren(make("p", { class: "note" }, "comparing …"));
    try {
      this.show(await ask("diff", { other: this.other.value }));
      say(this.result.querySelector("h3")?.textContent ?? "Compared");
    } catch (error) {
      this.result.replaceChildren(problem(error));
    }
  }

  show(diff) {
    if (!this.numbers.size) this.leaves.names.forEach((name, leaf) => this.numbers.set(name, leaf));
    this.result.replaceChildren(...this.said(diff));
  }

  /** The name of a leaf, to press where this checkpoint has it. */
  nameOf(each) {
    const leaf = this.numbers.get(each.name);
    if (each.kind === "metadata" || leaf === undefined) return each.name || (each.kind === "metadata" ? "the metadata" : "the root");
    return leafButton(each.name, () => this.goTo(leaf));
  }

  /** What is said of a comparison. */
  said(diff) {
    const { differences } = diff;
    const facts = factsOf([["Compared with", diff.other]]);
    const equal = [diff.equal ?? 0, diff.equal_bytes ?? 0];
    if (!differences.length) return [facts, make("p", { class: "good" }, `Nothing differs: ${leavesText(equal[0])} are equal, ${bytesText(equal[1])}.`)];
    const count = new Map();
    for (const each of differences) {
      const [number, bytes] = count.get(each.kind) ?? [0, 0];
      count.set(each.kind, [number + 1, bytes + (each.bytes ?? 0)]);
    }
    const all = [...count, ["equal", equal]];
    const most = Math.max(1, ...all.map(([, [, bytes]]) => bytes));
    const sums = all.map(([kind, [number, bytes]]) => [kind === "equal" ? kind : kindText(kind), numberText(number), bytesText(bytes), partBar(bytes / most)]);
    const shown = differences.slice(0, MOST_DIFFERENCES);
    const rows = shown.map((each) => [this.nameOf(each), kindText(each.kind), each.first, each.second === each.first ? "" : each.second, each.bytes ? bytesText(each.bytes) : ""]);
    const more = differences.length - shown.length;
    return [facts,
      tableOf(["What", "Leaves", "Size", "Share"], sums, [1, 2], { id: "diff-sums", class: "parts" }),
      make("h3", {}, counted(differences.length, "difference")),
      tableOf(["Leaf", "What", "Here", "There", "Size"], rows, [4], { id: "differences" }),
      ...(more ? [make("p", { class: "note" }, `and ${numberText(more)} more`)] : [])];
  }
}
